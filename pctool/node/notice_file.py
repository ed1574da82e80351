"""The notice file: what root's watcher saw, for every process of the node.

Root's watcher keeps it at /run/pctool/notice.json, readable by all, replaced atomically, and touches it after each
poll. A reader believes it only while its modification time is fresh and its node is the reader's: a dead watcher's
last words, or another node's file where many share one machine, are no news.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pctool.aws.imds import Notice
from pctool.run.layout import write_atomic

DEFAULT_PATH = Path("/run/pctool/notice.json")
FRESH_S = 10.0  # five polls of the watcher


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What one look at a node's instance metadata gave."""

    node: str
    notice: Notice | None = None
    rebalance: float | None = None  # when EC2 recommended it, seconds since the epoch


def write_sighting(path: Path, sighting: Sighting) -> None:
    """Replace the file (mode 0644). The folder is made if it is missing. Raise OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    record = {**asdict(sighting), "seen": round(time.time(), 3), "pid": os.getpid()}
    write_atomic(path, json.dumps(record).encode() + b"\n")
    path.chmod(0o644)  # whatever the umask of root's service is


def touch(path: Path) -> None:
    """Say that the file is still true. Raise OSError, FileNotFoundError among them."""
    os.utime(path)


def read_sighting(path: Path, *, node: str, now: float) -> Sighting | None:
    """Return the watcher's sighting if the file is there, fresh at `now` (seconds since the epoch), and this node's."""
    try:
        with path.open() as file:
            age = now - os.fstat(file.fileno()).st_mtime
            record = json.load(file)
        notice = record["notice"]
        sighting = Sighting(
            node=record["node"], notice=Notice(**notice) if notice else None, rebalance=record["rebalance"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sighting if sighting.node == node and abs(age) <= FRESH_S else None
