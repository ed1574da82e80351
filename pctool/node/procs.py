"""Find and end processes through /proc."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that any thread of `pid` started; [] if it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        with suppress(OSError, ValueError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, children before their children."""
    found = children(pid)
    for child in found:
        found += children(child)  # the list grows while it is walked: breadth first
    return found


def has_environment(pid: int, name: str) -> bool:
    """Return whether the process was started with the environment variable `name`."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(name.encode() + b"=") for entry in environ.split(b"\0"))


def handles(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal (SigCgt in /proc/PID/status)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def send(pids: list[int], signum: signal.Signals) -> None:
    """Send a signal to each; those that are gone are passed by."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
