"""Eight ranks, as of several nodes: what fails on one of them fails that save on all, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_gang import Gang, complete_steps, events
from engine_ranks import Job, Progress
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pctool.run.layout import RunDir
from pctool.train import Run

pytestmark = pytest.mark.torch

RAISES, UNPICKLABLE, LATE, UNEQUAL, LAST = 2, 4, 6, 8, 10


class Trouble:
    """State of each rank's own that fails on one rank after some steps."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 5 and self.step == RAISES:
            raise RuntimeError("no state today")
        odd = {"cannot": lambda: None} if self.rank == 3 and self.step == UNPICKLABLE else {}
        return {"step": self.step, "rank": self.rank, **odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.step = state["step"]


class Module(torch.nn.Module):
    """A part that is one value over all ranks: one rank fails late, or has keys of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.step = rank, 0
        self.weight = torch.nn.Parameter(torch.zeros(5))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = {"weight": self.weight.detach(), "value": self.step}
        if self.rank == 6 and self.step == LATE:
            state["late"] = lambda: None  # found out while it is serialised, behind the agreement
        if self.rank in {2, 7} and self.step == UNEQUAL:
            state[f"of {self.rank} alone"] = torch.full((3,), float(self.rank))
            del state["value"]
        return state

    def load_state_dict(self, state: dict[str, Any], *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.step = state["value"]
        with torch.no_grad():
            self.weight.copy_(state["weight"])


def body(job: Job) -> None:
    rank, progress = dist.get_rank(), Progress(job.progress)
    trouble, module = Trouble(rank), Module(rank)
    run = Run(model=torch.nn.Linear(30, 30), extra={"trouble": trouble, "module": module}, every=1)
    if run.step:
        assert (trouble.step, module.step) == (run.step, run.step)
        assert torch.equal(module.weight.detach(), torch.full((5,), float(run.step)))
    for step, _ in run.steps(range(100), until=job.until):
        progress.put(1, step)
        trouble.step = module.step = step
        with torch.no_grad():
            module.weight.fill_(step)


@pytest.fixture
def gangs() -> Iterator[list[Gang]]:
    found: list[Gang] = []
    yield found
    for gang in found:
        gang.close()


def test_what_fails_on_one_of_eight_ranks_fails_one_save_on_all(tmp_path: Path, gangs: list[Gang]) -> None:
    run = RunDir(tmp_path / "run")
    for attempt, until in enumerate([LAST, LAST + 1]):
        gang = Gang(run, attempt, tmp_path, world=8, served=True, body=body, job={"until": until})
        gangs.append(gang)
        assert gang.start().end() == [0] * 8, gang.log()
    failed = {event.fields["step"]: event.fields["error"] for event in events(run, "commit-failed")}
    assert failed.keys() == {RAISES, UNPICKLABLE, LATE}
    assert "failed on rank 5: " in failed[RAISES]
    assert "no state today" in failed[RAISES]
    assert "rank 3:" in failed[UNPICKLABLE]
    assert "rank 6:" in failed[LATE]
    assert set(complete_steps(run).values()) == set(range(1, LAST + 2)) - failed.keys()
    assert [event.fields["step"] for event in events(run, "resumed")] == [LAST]
    folder = run.checkpoints / f"000000-{UNEQUAL:08d}"
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {"module.of 2 alone", "module.of 7 alone", "module.value"} <= known.keys()
