"""The stop request: a small JSON file in the attempt's folder, written once."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pctool.run.layout import AttemptDir, write_atomic


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why and until when the gang should stop, and whether it should go on afterwards."""

    why: str  # notice | time-limit | user | standing-notice
    who: str = ""  # a node name or a user
    deadline: float = 0.0  # seconds since the epoch; 0: none known
    requeue: bool = True


def write_stop(attempt: AttemptDir, request: StopRequest) -> None:
    """Write the request; an existing one is replaced."""
    record = {
        "why": request.why,
        "who": request.who,
        "deadline": request.deadline,
        "requeue": request.requeue,
    }
    write_atomic(attempt.stop, json.dumps(record).encode() + b"\n")


def read_stop(attempt: AttemptDir) -> StopRequest | None:
    """Return the request, or None if there is none. An empty or unreadable file still means stop (why 'user')."""
    try:
        data = attempt.stop.read_bytes()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data)
        return StopRequest(
            why=str(record.get("why", "user")),
            who=str(record.get("who", "")),
            deadline=float(record.get("deadline") or 0.0),
            requeue=bool(record.get("requeue", True)),
        )
    except (ValueError, AttributeError, TypeError):
        return StopRequest(why="user")
