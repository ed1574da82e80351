"""Requeue and hold outlast a slurmctld that is away, and take a refusal as such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pctool.errors import HOLD, SlurmError
from pctool.job.hold import hold, requeue
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.command import Completed

AWAY = "slurm_requeue error: Unable to contact slurm controller (connect failure)"
Script = Callable[..., list[Sequence[str]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the time that Slurm is asked by; it passes by sleeping alone."""
    now = [0.0]
    sleep: Callable[[float], None] = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(query, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Script:
    """Return `script(*said)`: what scontrol says at each call, '' for success; the last one is said for ever."""

    def script(*said: str) -> list[Sequence[str]]:
        asked: list[Sequence[str]] = []
        answers: Iterator[str] = iter(said)

        def ask(argv: Sequence[str], **_: Any) -> Completed:
            asked.append(argv)
            text = next(answers, said[-1])
            return Completed(tuple(argv), 1 if text else 0, "", text)

        monkeypatch.setattr(query, "ask", ask)
        return asked

    return script


def test_a_requeue_is_tried_until_slurmctld_is_back(scontrol: Script, clock: list[float]) -> None:
    asked = scontrol(AWAY, AWAY, "slurm_requeue error: Zero Bytes were transmitted or received", "")
    assert requeue("7")
    assert asked == [["scontrol", "requeue", "7"]] * 4
    assert clock[0] == 3 * query.RETRY_S


def test_a_requeue_whose_answer_was_lost_is_done(scontrol: Script) -> None:
    scontrol(AWAY, "Job is pending execution for job 7")
    assert requeue("7")


@pytest.mark.parametrize("said", ["Access/permission denied", "Requested operation is presently disabled for job 7"])
def test_a_refusal_is_not_tried_again(scontrol: Script, clock: list[float], said: str) -> None:
    asked = scontrol(said)
    with pytest.raises(SlurmError, match=r"`scontrol requeue 7` was refused"):
        requeue("7")
    assert len(asked) == 1
    assert clock[0] == 0


def test_a_requeue_gives_up_after_half_an_hour_without_ending_the_job(
    scontrol: Script, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    scontrol(AWAY)
    assert not requeue("7")
    assert query.LONG_PATIENCE_S - query.RETRY_S <= clock[0] <= query.LONG_PATIENCE_S
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_hold_outlasts_a_reboot_of_the_head_node(
    tmp_path: Path, scontrol: Script, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol("")

    def codes() -> tuple[frozenset[int], frozenset[int]]:
        if clock[0] < 400:
            raise SlurmError(AWAY)
        return frozenset(), frozenset()

    monkeypatch.setattr(query, "requeue_exit_codes", codes)
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: None)
    found = hold(RunDir(tmp_path), job_id="7", rule="stalled", why="", attempt=None)
    assert (found.code, found.how) == (HOLD, "scontrol")


def test_a_hold_that_slurm_never_answers_is_left_to_the_exit_code(
    tmp_path: Path, scontrol: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(AWAY)
    monkeypatch.setattr(query, "requeue_exit_codes", lambda: (frozenset(), frozenset()))
    found = hold(RunDir(tmp_path), job_id="7", rule="stalled", why="", attempt=None)
    assert (found.code, found.how) == (HOLD, "exit-code")


def test_a_ledger_that_cannot_even_be_looked_at_does_not_keep_the_job_from_being_held(
    tmp_path: Path, scontrol: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol("")
    monkeypatch.setattr(query, "requeue_exit_codes", lambda: (frozenset(), frozenset({HOLD})))

    def gone(self: Path) -> bool:
        raise OSError(108, "Cannot send after transport endpoint shutdown", str(self))

    monkeypatch.setattr(Path, "exists", gone)
    found = hold(RunDir(tmp_path), job_id="7", rule="run-unwritable", why="", attempt=None)
    assert found.code == HOLD
    assert Ledger(RunDir(tmp_path).ledger).read() == []


def test_a_command_that_cannot_be_started_is_slurm_s_silence(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="cannot be started: Permission denied"):
        query.ask([str(tmp_path)])
