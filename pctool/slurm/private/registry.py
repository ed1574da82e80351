"""The private clusters that a user has started by name and that outlive the command which did: `pctool local`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pctool.errors import NotFoundError, UsageError
from pctool.slurm.private.client import PrivateCluster

DEFAULT_NAME = "default"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")


def state_folder() -> Path:
    """Return where the names are kept, one file a cluster."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "pctool" / "local"


def names() -> list[str]:
    """Return the names of the clusters that are up; entries of ended ones are removed."""
    entries = sorted(state_folder().glob("*.json"))
    return [entry.stem for entry in entries if _answers(entry)]


def find(name: str) -> PrivateCluster:
    """Return the cluster called `name`; raise NotFoundError, naming those that are up, if there is none."""
    cluster = _attach(_entry(name))
    if cluster is not None:
        return cluster
    up = names()
    fix = f"name one of those that are up: {', '.join(up)}" if up else "start one with `pctool local up --cluster FILE`"
    raise NotFoundError(f"there is no private cluster {name!r}", fix=fix)


@contextmanager
def claim(name: str) -> Iterator[Path]:
    """Reserve a name while its cluster is started; yield the file that `record` fills. Released if the start fails.

    Raises UsageError if a cluster of that name is up or being started.
    """
    entry = _entry(name)
    entry.parent.mkdir(parents=True, exist_ok=True)
    _answers(entry)  # removes what an ended cluster has left
    try:
        entry.open("x").close()
    except FileExistsError:
        raise UsageError(
            f"a private cluster {name!r} is up already, or being started",
            fix=f"use it, end it with `pctool local down --name {name}`, or choose another --name",
        ) from None
    try:
        yield entry
    except BaseException:  # Ctrl-C included
        entry.unlink(missing_ok=True)
        raise


def record(entry: Path, cluster: PrivateCluster) -> None:
    """Write which cluster has the name."""
    entry.write_text(json.dumps({"folder": str(cluster.folder)}))


def forget(name: str) -> None:
    """Free a name."""
    _entry(name).unlink(missing_ok=True)


def _entry(name: str) -> Path:
    if not _NAME.match(name):
        raise UsageError(f"{name!r} cannot be the name of a private cluster", fix="use letters, digits, . _ and -")
    return state_folder() / f"{name}.json"


def _answers(entry: Path) -> bool:
    if not entry.exists():
        return False
    if _attach(entry) is not None:
        return True
    if entry.stat().st_size:  # an empty one is being started
        entry.unlink(missing_ok=True)
    return False


def _attach(entry: Path) -> PrivateCluster | None:
    try:
        return PrivateCluster.attach(Path(json.loads(entry.read_text())["folder"]))
    except (OSError, ValueError, KeyError, NotFoundError):
        return None
