"""The private clusters that a user has started by name and that outlive the command which did: `pctool local`."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pctool.errors import NotFoundError, UsageError
from pctool.slurm.private import proc
from pctool.slurm.private.client import PrivateCluster

DEFAULT_NAME = "default"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")


def state_folder() -> Path:
    """Return where the names are kept, one file a cluster."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "pctool" / "local"


def names() -> list[str]:
    """Return the names of the clusters that are up; entries of ended ones and of killed starts are removed."""
    if not state_folder().exists():
        return []
    with _locked():
        return [entry.stem for entry in sorted(state_folder().glob("*.json")) if _answers(entry)]


def find(name: str) -> PrivateCluster:
    """Return the cluster called `name`; raise NotFoundError, naming those that are up, if there is none."""
    cluster = _attach(_entry(name))
    if cluster is not None:
        return cluster
    if starter := _starter(_entry(name)):
        raise NotFoundError(
            f"{name!r} is not up yet: process {starter} is starting it", fix="wait until it is up, or end that process"
        )
    up = names()
    fix = f"name one of those that are up: {', '.join(up)}" if up else "start one with `pctool local up --cluster FILE`"
    raise NotFoundError(f"there is no private cluster {name!r}", fix=fix)


@contextmanager
def claim(name: str) -> Iterator[Path]:
    """Reserve a name while its cluster is started; yield the file that `record` fills. Released if the start fails.

    Until then the file names this process, so that a name whose start was killed is free again.
    Raises UsageError if a cluster of that name is up or being started.
    """
    entry = _entry(name)
    with _locked():
        if _answers(entry):
            raise UsageError(
                f"a private cluster {name!r} is up already",
                fix=f"use it, end it with `pctool local down --name {name}`, or choose another --name",
            )
        if starter := _starter(entry):
            raise UsageError(
                f"process {starter} is starting a private cluster {name!r}",
                fix="wait until it is up, or choose another --name",
            )
        _write(entry, {"starter": {"pid": os.getpid(), "started": proc.started(os.getpid())}})
    try:
        yield entry
    except BaseException:  # Ctrl-C included
        entry.unlink(missing_ok=True)
        raise


def record(entry: Path, cluster: PrivateCluster) -> None:
    """Write which cluster has the name."""
    _write(entry, {"folder": str(cluster.folder)})


def forget_killed_start(name: str) -> bool:
    """Free a name whose start was killed, and tell whether it was one; what it had started ends by itself.

    The keeper of such a cluster cannot report that it is ready, and ends it.
    """
    entry = _entry(name)
    if not entry.exists():
        return False
    with _locked():
        killed = "starter" in _read(entry) and not _starter(entry)
        if killed:
            entry.unlink()
    return killed


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
    if not _starter(entry):
        entry.unlink(missing_ok=True)
    return False


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other commands from removing or taking over an entry between a look at it and what follows."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with state_folder().with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _starter(entry: Path) -> int | None:
    """Return the pid of the process that is starting the entry's cluster; None if there is none, or no longer."""
    starter = _read(entry).get("starter")
    if not isinstance(starter, dict) or not isinstance(starter.get("pid"), int):
        return None
    pid = int(starter["pid"])
    return pid if proc.started(pid) == starter.get("started") is not None else None


def _read(entry: Path) -> dict[str, Any]:
    try:
        found = json.loads(entry.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(entry: Path, content: dict[str, Any]) -> None:
    """Write an entry, whole or not at all."""
    draft = entry.with_suffix(".new")
    draft.write_text(json.dumps(content))
    draft.replace(entry)


def _attach(entry: Path) -> PrivateCluster | None:
    try:
        return PrivateCluster.attach(Path(_read(entry)["folder"]))
    except (OSError, KeyError, TypeError, NotFoundError):
        return None
