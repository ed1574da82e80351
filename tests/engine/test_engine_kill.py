"""Processes killed at random moments: the newest complete checkpoint is whole, and none that was promised is lost.

PCTOOL_ROUNDS sets how many kills (6), PCTOOL_SEED which ones.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_gang import Gang, complete_steps, events, send
from engine_ranks import Job, train

from pctool.checkpoint import frames
from pctool.checkpoint.engine import Engine
from pctool.checkpoint.frames import Receiver
from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.staging import Staging
from pctool.checkpoint.writer import Writer
from pctool.run.layout import RunDir

pytestmark = pytest.mark.torch

ROUNDS = int(os.environ.get("PCTOOL_ROUNDS", "6"))
SEED = int(os.environ.get("PCTOOL_SEED") or random.randrange(10**9))
KINDS = ("rank 0", "writer 0", "rank 1", "writer 1", "all", "server", "any writer")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


@pytest.fixture
def gangs() -> Iterator[list[Gang]]:
    """Collect gangs that are closed at the end, whatever happened."""
    found: list[Gang] = []
    yield found
    for gang in found:
        gang.close()


def test_kills_at_random_moments_lose_nothing(run: RunDir, tmp_path: Path, gangs: list[Gang]) -> None:
    print(f"PCTOOL_SEED={SEED}")
    dice = random.Random(SEED)
    job = {"kib": dice.choice([64, 1024, 4096])}
    for attempt in range(ROUNDS):
        kind = KINDS[attempt % len(KINDS)]
        before = find_resume(run, None)
        served = kind in {"server", "any writer"} or (kind in {"rank 0", "rank 1", "all"} and dice.random() < 0.5)
        gang = Gang(run, attempt, tmp_path, served=served, job=job)
        gangs.append(gang)
        gang.start()
        first = (before.step if before else 0) + 1
        gang.await_step(first + dice.randrange(5))
        assert {rank.restored for rank in gang.progress} == {first - 1}
        time.sleep(dice.random() * 0.1)
        one_kill(gang, kind, dice)
        print(f"round {attempt}: {kind}, served {served}, newest {max(complete_steps(run).values(), default=0)}")
    last = Gang(run, ROUNDS, tmp_path, job=job)
    gangs.append(last)
    newest = find_resume(run, None)
    last.start()
    last.await_step((newest.step if newest else 0) + 1)  # restored, every bit compared
    last.stop()
    assert last.end() == [0, 0], last.log()


def one_kill(gang: Gang, kind: str, dice: random.Random) -> None:
    """Kill, and see that nothing is lost that was promised, and nothing there that was not copied everywhere."""
    promised = max([gang.page.committed, *(event.fields["step"] for event in events(gang.run, "committed"))])
    if kind in {"server", "any writer", "writer 0", "writer 1"}:
        kill_writer(gang, kind, dice)
        return
    pids = [gang.ranks[rank].pid for rank in ((0, 1) if kind == "all" else (int(kind[-1]),))]
    pids += [*gang.writer_pids(), gang.server_pid()] if kind == "all" else []
    for pid in pids:
        send(pid, signal.SIGKILL)
    gang.end()
    newest = max(complete_steps(gang.run).values(), default=0)
    assert newest >= promised
    # one that was killed in its first step has done none, and what it restored is there
    assert newest <= min(max(rank.done, rank.restored) for rank in gang.progress), gang.log()
    if kind != "all":
        copied = min(rank.begun for rank in gang.progress) - 1
        assert newest >= copied, f"all ranks had copied step {copied}\n{gang.log()}"
    point = find_resume(gang.run, None)
    assert (point.step if point else 0) == newest


def kill_writer(gang: Gang, kind: str, dice: random.Random) -> None:
    """Kill a writer alone: training goes on, and what is saved later is complete."""
    victims: dict[str, Callable[[], int | None]] = {
        "server": gang.server_pid,
        "any writer": lambda: dice.choice([*gang.writer_pids(), None]),  # None: there may be none yet
        "writer 0": lambda: gang.writer_of(0),
        "writer 1": lambda: gang.writer_of(1),
    }
    victim = victims[kind]()
    send(victim, signal.SIGKILL)
    at = max(rank.done for rank in gang.progress)
    gang.await_commit(at + 3)
    gang.stop()
    assert gang.end() == [0, 0], gang.log()
    told = [event.fields["step"] for event in events(gang.run, "committed", "commit-failed", attempt=gang.attempt)]
    first = gang.progress[0].restored + 1
    assert set(told) == set(range(first, gang.progress[0].done + 1)), "a save that is neither complete nor failed"
    failed = {event.fields["step"] for event in events(gang.run, "commit-failed", attempt=gang.attempt)}
    assert len(failed) <= 1, failed
    assert at - 2 <= min(failed, default=at) <= at + 1


DIES_AT = 5


def dying(job: Job) -> None:
    """Train; rank 1 kills itself in the save of one step: before it has copied its state, or as soon as it has."""
    owner, name = (Staging, "append") if job.options["dies"] == "before the copy" else (Engine, "_hand_over")
    real, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        last = dist.get_rank() == 1 and next(calls) == DIES_AT
        if last and owner is Staging:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)
    train(job)


@pytest.mark.parametrize(("dies", "newest"), [("before the copy", DIES_AT - 1), ("behind the copy", DIES_AT)])
def test_a_save_counts_if_and_only_if_all_had_copied(
    dies: str, newest: int, run: RunDir, tmp_path: Path, gangs: list[Gang]
) -> None:
    gang = Gang(run, 0, tmp_path, body=dying, job={"kib": 512, "options": {"dies": dies}})
    gangs.append(gang)
    assert gang.start().end()[1] == -signal.SIGKILL
    assert max(complete_steps(run).values()) == newest
    failed = {event.fields["step"]: event.fields["error"] for event in events(run, "commit-failed")}
    assert failed == ({DIES_AT: "rank 1 has gone without having written it"} if newest < DIES_AT else {})


def test_a_save_ordered_just_after_the_coordinator_died_does_not_wait_for_ever() -> None:
    """The writer has said `cut` when nothing was in flight; what it sends to a dead peer at first is lost silently."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours:
        writer = threading.Thread(target=Writer(theirs).serve)
        writer.start()
        answers = Receiver(ours)
        host, port = server.getsockname()
        frames.send(ours, {"op": "join", "host": host, "port": port, "rank": 1, "token": ""})
        link, _ = server.accept()
        frames.send(link, {"op": "welcome"})
        assert expect(answers) == "joined"
        link.close()
        assert expect(answers) == "cut"
        frames.send(ours, {"op": "abort", "name": "000000-00000001", "why": "because"})
        ours.settimeout(10.0)
        assert expect(answers) == "cut"
        ours.shutdown(socket.SHUT_WR)
        writer.join()
        theirs.close()


def expect(receiver: Receiver) -> str:
    frame = receiver.next()
    assert frame is not None
    return frame.op
