"""The writers beside launch: what all ranks had copied becomes a checkpoint, whatever ends the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from gang_harness import Gang

from pctool.checkpoint.manifest import is_complete

MakeGang = Callable[..., Gang]

pytestmark = pytest.mark.torch


def writers_of(launch: int) -> list[int]:
    """Return the pids of the writers' server of a launch and of its forks: they share a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"pctool.checkpoint.writer" in argv:
                found.append((int(entry.name), parent))
    servers = [pid for pid, parent in found if parent == launch]
    return [*servers, *(pid for pid, parent in found if parent in servers)]


def start(one: Gang, folder: Path, steps: int) -> None:
    one.options["module"] = "torch.distributed.run"
    one.start("saving.py", str(steps), str(folder))


def copied(one: Gang, folder: Path, step: int) -> None:
    for rank in range(one.nodes):
        path = folder / f"copied-{rank}"
        one.until(lambda path=path: path.exists() and path.read_text() == str(step), f"copy {step} of rank {rank}")  # type: ignore[misc]


def committed(one: Gang) -> list[int]:
    return [int(event.fields["step"]) for event in one.ledger("committed")]


def test_a_run_saves_through_launchs_writers(gang: MakeGang, tmp_path: Path) -> None:
    one = gang(nodes=2)
    start(one, tmp_path, 3)
    for step in (1, 2, 3):
        copied(one, tmp_path, step)
        (tmp_path / f"go-{step}").touch()
    assert one.codes() == [0, 0], one.story()
    assert committed(one) == [1, 2, 3]
    assert "step 3 is committed" in one.err(0)
    assert writers_of(one.processes[0].pid) == []


def test_what_all_ranks_had_copied_outlives_them(gang: MakeGang, tmp_path: Path) -> None:
    """Rank 1 dies while its node's writer has yet to write what it had copied."""
    one = gang(nodes=2)
    start(one, tmp_path, 9)
    copied(one, tmp_path, 1)
    one.until(lambda: committed(one) == [1], "the first save")
    frozen = writers_of(one.processes[1].pid)
    assert len(frozen) == 2  # the server and its fork
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    (tmp_path / "go-1").touch()
    copied(one, tmp_path, 2)
    (tmp_path / "die-1").touch()
    one.until(lambda: one.records().get("n1"), "the end of rank 1")
    assert committed(one) == [1]
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    assert 9 in one.codes(), one.story()
    assert committed(one) == [1, 2]
    assert is_complete(one.run.checkpoints / "000000-00000002").ok
    assert writers_of(one.processes[1].pid) == []


def test_a_server_that_is_killed_is_replaced(gang: MakeGang, tmp_path: Path) -> None:
    one = gang(nodes=2)
    start(one, tmp_path, 3)
    copied(one, tmp_path, 1)
    one.until(lambda: committed(one) == [1], "the first save")
    for pid in writers_of(one.processes[0].pid):
        os.kill(pid, signal.SIGKILL)
    for step in (1, 2, 3):
        (tmp_path / f"go-{step}").touch()
    assert one.codes() == [0, 0], one.story()
    assert committed(one)[-1] == 3
    assert "a new one follows" in one.err(0)
