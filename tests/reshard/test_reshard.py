"""A run goes on exactly with another number of ranks, another wrapping of the model and other batches."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from trainer_harness import Trainer, finish

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "scripts" / "layouts.py"
LENGTH = 61


def attempt(trainer: Trainer, holds: Path, *flags: str, ranks: int, code: int = 0) -> str:
    holds.mkdir(exist_ok=True)
    every = ("--length", str(LENGTH), "--holds", str(holds))
    return finish(trainer.start(*every, *flags, ranks=ranks, script=SCRIPT), code)


def held(holds: Path, when: str, ranks: int) -> dict[str, str]:
    """Return what all ranks held, who must agree on it."""
    found: list[dict[str, str]] = [json.loads((holds / f"{when}-rank{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == found[0] for one in found)
    return found[0]


def stream(trainer: Trainer, ranks: dict[int, int]) -> list[int]:
    """Return the samples of all steps in the order in which they are dealt; `ranks` says how many did a step."""
    dealt = []
    for step, count in ranks.items():
        batches = [trainer.metrics(rank)[step]["samples"] for rank in range(count)]
        assert len({len(batch) for batch in batches}) == 1
        dealt += [batch[place] for place in range(len(batches[0])) for batch in batches]
    return dealt


def test_four_sharded_ranks_then_two_replicas_then_three_shards(trainer: Trainer, tmp_path: Path) -> None:
    """What was held at the save is held after it, to the bit; each sample comes up once, whoever trains on it."""
    from pctool.train import ResumableSampler

    holds, fsdp, ddp = tmp_path / "holds", ("--wrap", "fsdp"), ("--wrap", "ddp")
    attempt(trainer, holds, *fsdp, "--steps", "2", "--every", "2", "--batch-size", "4", ranks=4)
    # it saves step 4, and is killed in step 6: the three ranks do step 5 again
    dies = ("--steps", "9", "--every", "2", "--batch-size", "5", "--workers", "2", "--die-at", "6")
    attempt(trainer, holds, *ddp, *dies, ranks=2, code=1)
    ends = ("--steps", "7", "--every", "9", "--batch-size", "3", "--workers", "1")
    said = attempt(trainer, holds, *fsdp, *ends, ranks=3)
    assert "resumed from 000001-00000004 (posix) at step 4" in said

    assert held(holds, "1-begin", 2) == held(holds, "0-step2", 4)
    assert held(holds, "2-begin", 3) == held(holds, "1-step4", 2)
    assert held(holds, "0-step2", 4) != held(holds, "1-step4", 2)

    ranks = {1: 4, 2: 4, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3}
    dealt = stream(trainer, ranks)
    assert len(dealt) == 2 * 16 + 2 * 10 + 3 * 9
    assert sorted(dealt[:LENGTH]) == list(range(LENGTH))
    assert dealt == list(islice(iter(ResumableSampler(LENGTH, seed=3)), len(dealt)))
