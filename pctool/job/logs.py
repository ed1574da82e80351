"""One rank's log, across attempts, and on through requeues.

Files are polled: inotify does not see what other nodes write to a shared file system.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from pctool.errors import NotFoundError
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import read_claim

POLL_S = 1.0  # a listing and a stat a second: a reader notices no more, a shared file system no less
ASK_SLURM_S = 15.0  # whether the job still lives; the controller is asked rarely, since most ends are in the ledger
_CHUNK = 1 << 20


def log_path(run: RunDir, attempt: int, rank: int) -> Path:
    """Return where a rank's log of one attempt is."""
    return run.logs(attempt) / f"rank-{rank}.log"


def header(run: RunDir, attempt: int) -> str:
    """Return the line that goes before an attempt's log."""
    claim = read_claim(run.attempt(attempt))
    if claim is None:
        return f"==> attempt {attempt} <==\n"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.time))
    return f"==> attempt {attempt} (job {claim.job_id}, restart {claim.restart}, {when}) <==\n"


def read_logs(run: RunDir, *, rank: int = 0, last: int | None = None) -> Iterator[bytes]:
    """Yield the logs of every attempt, each after its header line; with `last` only the last lines of all of them.

    Raises NotFoundError if no attempt has a log of that rank.
    """
    numbers = [number for number in run.attempt_numbers() if log_path(run, number, rank).exists()]
    if not numbers:
        raise NotFoundError(
            f"no attempt has a log of rank {rank} yet",
            where=str(run.path / "logs"),
            fix="see `pctool status`; with -f this waits for it",
        )
    pieces = (piece for number in numbers for piece in _attempt(run, number, rank))
    yield from pieces if last is None else _tail(pieces, last)


def follow(run: RunDir, *, rank: int, alive: Callable[[], bool], last: int | None = None) -> Iterator[bytes]:
    """Yield what is there and then what comes, over requeues, until the job is over for good.

    `alive` says whether Slurm still has the job; it is asked every ASK_SLURM_S.
    """
    follower = _Follower(run, rank)
    yield from follower.new() if last is None else _tail(follower.new(), last)
    asked = time.monotonic()
    while True:
        over = _is_decided(run)
        if not over and time.monotonic() - asked >= ASK_SLURM_S:
            over, asked = not alive(), time.monotonic()
        yield from follower.new()
        if over:
            return
        time.sleep(POLL_S)


class _Follower:
    """Reads on from where it was, attempt by attempt."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._offsets: dict[int, int] = {}

    def new(self) -> Iterator[bytes]:
        """Yield what has come since the last call. The log of an attempt that is not there yet is waited for."""
        for number in self._run.attempt_numbers():
            yield from self._new_of(number)

    def _new_of(self, number: int) -> Iterator[bytes]:
        try:
            stream = log_path(self._run, number, self._rank).open("rb")
        except FileNotFoundError:
            return
        with stream:
            if number not in self._offsets:
                yield header(self._run, number).encode()
            stream.seek(self._offsets.setdefault(number, 0))
            while piece := stream.read(_CHUNK):
                self._offsets[number] += len(piece)
                yield piece


def _is_decided(run: RunDir) -> bool:
    """Return whether the newest attempt was decided without a requeue."""
    newest = max(run.attempt_numbers(), default=None)
    decided = [event for event in Ledger(run.ledger).read() if event.event == "decided" and event.attempt == newest]
    return bool(decided) and decided[-1].fields.get("requeue") == "none"


def _attempt(run: RunDir, number: int, rank: int) -> Iterator[bytes]:
    yield header(run, number).encode()
    end = b"\n"
    with log_path(run, number, rank).open("rb") as stream:
        while piece := stream.read(_CHUNK):
            end = piece[-1:]
            yield piece
    if end != b"\n":
        yield b"\n"


def _tail(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    """Yield the last `count` lines, without holding more than those and one piece."""
    lines: deque[bytes] = deque(maxlen=count)
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        lines.extend(line + b"\n" for line in whole)
    if rest:
        lines.append(rest)
    yield from lines
