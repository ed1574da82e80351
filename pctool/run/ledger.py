"""The ledger: what happened to a run, one JSON object a line, only ever appended.

Only one host writes at a time (the batch host of the current attempt: claim, decide, launch on node 0, rank 0), so
O_APPEND is enough; other nodes send their events to node 0 over the channel.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS = {
    "submitted": "the run directory was made and a job submitted: job_id; for a batch script as it stands also script, "
    "sha256, argv, output (its file, as Slurm has it; null where Slurm did not say)",
    "claim": "an attempt starts: job_id, restart, nodes, host",
    "held": "claim held the job: why, rule (stalled | below-durable | "
    "foreign-checkpoints | store-unreadable | run-unwritable | run-missing | "
    "claim-unreadable | slurm-silent)",
    "started": "every launch of the gang is there: nodes, seconds (since the claim)",
    "step-back": "the attempt ends before torchrun starts, since a node has a standing notice: node, deadline",
    "notice": "a node got a spot notice: node, action, deadline, seen",
    "rebalance": "a node got a rebalance recommendation: node, notice_time",
    "stop-requested": "the gang is asked to stop: why (notice | time-limit | user), node, deadline",
    "stop-armed": "every launch has set its flag: seconds (since the request)",
    "stop-step": "the ranks agreed where to stop: step",
    "resumed": "ranks restored a checkpoint: name, step, tier, seconds",
    "fresh": "ranks found no checkpoint and start at step 0",
    "branched": "a new run begins from another run's checkpoint: source, step",
    "first-step": "the first step of the attempt is done: step",
    "committed": "a checkpoint is complete: name, step, bytes, seconds, stall_s (training stood still), "
    "waited_s (before that, for the save before), tier (posix), "
    "parent, keep, keep_for, keep_every (what is kept)",
    "save-skipped": "a save that was due was left out: step, why",
    "commit-failed": "a checkpoint was not completed: name, step, error",
    "final-save-skipped": "the save at the stop would not fit: step, predicted_s, left_s",
    "rejected": "a checkpoint is there but damaged or incomplete: name, tier, why",
    "mirrored": "a checkpoint is complete on S3: name, step, seconds, bytes",
    "mirror-failed": "a checkpoint is not on S3: name, step, error, waiting (others that are not there either)",
    "pruned": "a checkpoint was removed: name",
    "node-exit": "how a launch ended: node, cause, code",
    "peer-lost": "a launch's connection is gone: node",
    "decided": "decide's verdict: code, cause, why, saved, requeue (exit-code | scontrol | none)",
    "accepted": "the owner accepted resuming from another checkpoint: step, name (null: a new start), run (whose "
    "it is), newest (the newest attempt that has a checkpoint anywhere)",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the ledger."""

    time: float  # seconds since the epoch
    attempt: int | None
    event: str
    fields: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """Append events to a run's ledger and read them back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Append one event, durable on return.

        Raises KeyError for an event that EVENTS does not define, OSError where it could not be written whole.
        """
        if event not in EVENTS:
            raise KeyError(f"unknown ledger event {event!r}")
        record = {"time": round(time.time(), 3), "attempt": attempt, "event": event, **fields}
        line = json.dumps(record, separators=(",", ":")) + "\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            data = _start_of_line(fd) + line.encode()
            if os.write(fd, data) != len(data):  # a second write could land behind another process's line
                raise OSError(errno.ENOSPC, "the event was written in part", str(self.path))
            os.fsync(fd)
        except OSError as error:
            error.filename = str(self.path)  # a write or an fsync does not know it
            raise
        finally:
            os.close(fd)

    def read(self) -> list[Event]:
        """Return every whole event in order; a torn line (a writer died in it) is left out. [] if there is no file."""
        return list(self._events())

    def _events(self) -> Iterator[Event]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.split(b"\n"):
            event = _parse(line)
            if event is not None:
                yield event


def _start_of_line(fd: int) -> bytes:
    """Return a newline if the file ends in a torn line, so that the next event stays readable."""
    size = os.fstat(fd).st_size
    return b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""


def _parse(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
        return Event(time=record.pop("time"), attempt=record.pop("attempt"), event=record.pop("event"), fields=record)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
