"""The phases of Slurm's job states."""

from __future__ import annotations

import pytest

from pctool.slurm.states import PHASES, Phase, is_ended, phase


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", Phase.PENDING),
        ("SPECIAL_EXIT", Phase.PENDING),
        ("RUNNING", Phase.RUNNING),
        ("COMPLETING", Phase.COMPLETING),
        ("CANCELLED by 1000", Phase.ENDED),
        ("CANCELLED+", Phase.ENDED),
        ("NODE_FAIL", Phase.ENDED),
        ("SOMETHING_NEW", Phase.RUNNING),
        ("", Phase.RUNNING),
    ],
)
def test_phase(state: str, expected: Phase) -> None:
    assert phase(state) is expected


def test_only_final_states_are_ended() -> None:
    ended = {state for state in PHASES if is_ended(state)}
    assert "COMPLETING" not in ended
    assert "REQUEUED" not in ended
    assert ended >= {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
