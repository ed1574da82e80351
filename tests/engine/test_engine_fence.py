"""An attempt that was stopped in the middle of a save and goes on after the next one has committed: it is fenced."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_gang import Gang, complete_steps, events, send, wait_for

from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.stores import PosixStore
from pctool.errors import FencedError
from pctool.run.layout import RunDir

pytestmark = pytest.mark.torch


@pytest.fixture
def gangs() -> Iterator[list[Gang]]:
    found: list[Gang] = []
    yield found
    for gang in found:
        gang.signal_ranks(signal.SIGCONT)
        gang.close()


@pytest.mark.parametrize("moment", ["in a save", "at any moment"])
def test_a_stale_attempt_that_wakes_up_changes_nothing(moment: str, tmp_path: Path, gangs: list[Gang]) -> None:
    run = RunDir(tmp_path / "run")
    stale = Gang(run, 0, tmp_path, job={"kib": 512, "keep": 2})
    gangs.append(stale)
    stale.start().await_step(4)
    stalled = freeze(stale, moment)
    fresh = Gang(run, 1, tmp_path, job={"kib": 512, "keep": 2})
    gangs.append(fresh)
    first = max(complete_steps(run).values())
    fresh.start().await_commit(first + 3)
    assert {rank.restored for rank in fresh.progress} == {first}
    fresh.stop()
    assert fresh.end() == [0, 0], fresh.log()
    before = complete_steps(run)
    told = len(events(run, "committed", "pruned", "mirrored", attempt=0))
    for pid in stalled:
        send(pid, signal.SIGCONT)
    assert stale.end() == [1, 1]
    for rank in (0, 1):
        assert "FencedError" in stale.log(rank)
        assert "attempt 1 has taken over this run, so attempt 0 may write nothing more" in stale.log(rank)
    if moment == "in a save":
        assert complete_steps(run) == before
        assert len(events(run, "committed", "pruned", "mirrored", attempt=0)) == told
    else:  # stopped behind the fence it may end the one thing that it was at, which is of its own attempt
        changed = complete_steps(run).keys() ^ before.keys()
        assert len(changed) <= 1
        assert all(name.startswith("000000-") for name in changed)
        assert len(events(run, "committed", "pruned", "mirrored", attempt=0)) <= told + 1
    point = find_resume(run, None)
    assert point is not None
    assert (point.attempt, point.step) == (1, max(before.values()))
    with pytest.raises(FencedError):
        Mirror(run, PosixStore(tmp_path / "remote"), 0).poke()
    assert not (tmp_path / "remote").exists()


def freeze(gang: Gang, moment: str) -> list[int]:
    """Stop an attempt's ranks and writers; return them all, writers last."""
    ranks = [process.pid for process in gang.ranks if process.pid is not None]
    slow = gang.writer_of(1)
    if moment == "in a save" and slow is not None:
        send(slow, signal.SIGSTOP)  # it answers no more, so that a save stays under way
        wait_for("ranks that wait", lambda: min(rank.done for rank in gang.progress) >= gang.page.committed + 2, 30.0)
    found = [*ranks, *gang.writer_pids()]
    for pid in found:
        send(pid, signal.SIGSTOP)
    return found
