"""Over many saves neither ranks nor writers grow: memory, descriptors, threads. PCTOOL_SAVES sets how many (100)."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_gang import Gang, complete_steps, events, wait_for
from engine_ranks import Job, Own, Progress

from pctool.run.layout import RunDir
from pctool.train import Run

pytestmark = pytest.mark.torch

SAVES = int(os.environ.get("PCTOOL_SAVES", "100"))
SETTLED = 40  # by then the shapes have changed, and caches are filled
WIDER_AT = 20
SAMPLES = 12
MORE_KIB = 2048  # the interpreter's and gloo's own ups and downs; a leak of a save's bytes is far above


class Wide(torch.nn.Module):
    """A module that becomes wider once, so that another plan and other memory are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(50_000))

    def set(self, step: int) -> None:
        if step == WIDER_AT:
            self.weight = torch.nn.Parameter(torch.zeros(1_500_000))
        with torch.no_grad():
            self.weight.fill_(step)


def body(job: Job) -> None:
    rank, progress = dist.get_rank(), Progress(job.progress)
    wide, own = Wide(), Own(rank, grows=True)
    run = Run(model=torch.nn.Linear(8, 8), extra={"wide": wide, "own": own}, every=1, keep=2)
    for step, _ in run.steps(range(1000), until=job.until):
        progress.put(1, step)
        wide.set(step)
        own.set(step)
        if step == job.options["pause"]:
            signal.pause()  # until it is killed


@dataclass(frozen=True)
class Sample:
    """What one process holds."""

    kib: int
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    folder = Path(f"/proc/{pid}")
    lines = [line.split() for line in (folder / "smaps_rollup").read_text().splitlines()[1:]]
    sizes = {line[0]: int(line[1]) for line in lines}
    threads = len(os.listdir(folder / "task"))
    return Sample(sizes["Anonymous:"] + sizes["Pss_Shmem:"], len(os.listdir(folder / "fd")), threads)


def least(pids: list[int], gang: Gang, first: int) -> list[Sample]:
    """Return the least that each process held at some moments from step `first` on."""
    found: list[list[Sample]] = [[] for _ in pids]
    for number in range(SAMPLES):
        gang.await_step(first + number)
        for mine, pid in zip(found, pids, strict=True):
            mine.append(sample(pid))
    return [
        Sample(min(one.kib for one in mine), min(one.descriptors for one in mine), min(one.threads for one in mine))
        for mine in found
    ]


def test_nothing_grows_over_many_saves(tmp_path: Path) -> None:
    last = SETTLED + SAVES
    options: dict[str, Any] = {"until": last + 100, "options": {"pause": last + SAMPLES}}
    gang = Gang(RunDir(tmp_path / "run"), 0, tmp_path, body=body, job=options)
    gang.start()
    try:
        gang.await_step(SETTLED)
        pids = [process.pid or 0 for process in gang.ranks] + gang.writer_pids()
        assert len(pids) == 4
        early = least(pids, gang, SETTLED)
        late = least(pids, gang, last)
        wait_for("the last commit", lambda: gang.page.committed >= last + SAMPLES - 1)
        assert not events(gang.run, "commit-failed")
        assert len(events(gang.run, "committed")) == last + SAMPLES - 1
        assert max(complete_steps(gang.run).values()) == last + SAMPLES - 1
    finally:
        gang.close()
    for name, before, after in zip(["rank 0", "rank 1", "writer", "writer"], early, late, strict=True):
        print(name, before, after)
        assert after.kib <= before.kib + MORE_KIB, (name, before, after)
        assert (after.descriptors, after.threads) == (before.descriptors, before.threads), name
