"""Who else needs a checkpoint: another run that starts from it refers to it, and then it is not removed.

A ref is RUN/checkpoints/.refs/<checkpoint>/<16 hex digits>.json, named after the other run directory. It counts as long
as that directory exists, and also where that cannot be asked; nobody has to take it back. To refer and to remove must
not cross: who removes first leaves the file `removing` beside the refs, then looks for refs once more; who refers first
leaves the ref, then looks for `removing`. Of two that meet, one sees the other, and both step back at worst.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import IncompleteError, NotFoundError
from pctool.run.layout import RunDir, fsync_dir, parse_checkpoint_name, write_atomic

FOLDER = ".refs"
_REMOVING = "removing"
# The manifest goes right after the announcement: where it is still there after so long, the process that was to take it
# away has died, and the checkpoint has stayed.
_LEFT_BEHIND_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Ref:
    """One ref: which checkpoint, by which other run, and since when (seconds since the epoch).

    `run` is None and `time` 0 where the file cannot be understood; such a ref counts all the same.
    """

    name: str
    run: Path | None
    time: float
    counts: bool


def refer(source: RunDir, name: str, other: RunDir) -> None:
    """Keep the checkpoint `name` of `source` from being removed for as long as the run directory `other` exists.

    `other` must exist by then, or the ref counts for nothing. Doing it twice is doing it once. Raises NotFoundError if
    the checkpoint or `other` is not there, IncompleteError if it is not complete or is just being removed, OSError and
    StoreUnreadableError where the file system says no.
    """
    path = other.path.absolute()
    if not path.is_dir():
        raise NotFoundError("the run directory that is to refer is not there", where=str(path), fix="make it first")
    _check_there(source, name)
    folder = _folder(source, name)
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder.parent, source.checkpoints):  # each may have been made just now
        fsync_dir(made)
    file = folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.json"
    known = file.exists()
    record = {"run": str(path), "time": round(time.time(), 3)}
    write_atomic(file, json.dumps(record).encode() + b"\n")
    try:
        _check_there(source, name)
        if _is_being_removed(folder):
            raise IncompleteError(
                f"checkpoint {name} is just being removed",
                where=str(source.checkpoints / name),
                fix="choose a newer one",
            )
    except BaseException:
        if not known:
            file.unlink(missing_ok=True)
        raise


def refs_of(run: RunDir) -> list[Ref]:
    """Return all refs to a run's checkpoints. Raises StoreUnreadableError if they cannot be listed."""
    names = sorted(name for name in _listed(run.checkpoints / FOLDER) if parse_checkpoint_name(name))
    return [ref for name in names for ref in _refs(run, name)]


def referred(run: RunDir) -> frozenset[str]:
    """Return the checkpoints that another run refers to. Raises StoreUnreadableError if that cannot be told."""
    return frozenset(ref.name for ref in refs_of(run) if ref.counts)


@contextmanager
def removing(run: RunDir, name: str) -> Iterator[bool]:
    """Announce that a checkpoint is about to be removed; yield whether it may be, since no ref has come in between.

    Raises StoreUnreadableError if that cannot be told. A process that dies in here leaves its announcement, so that
    nobody refers to what may be half gone; the next to remove it goes on from there.
    """
    folder = _folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    announcement = folder / _REMOVING
    announcement.touch()
    if any(ref.counts for ref in _refs(run, name)):
        announcement.unlink(missing_ok=True)
        yield False
        return
    yield True
    # what is left here says nothing about a checkpoint that is gone, and its removal must be told all the same
    shutil.rmtree(folder, ignore_errors=True)


def _is_being_removed(folder: Path) -> bool:
    try:
        age_s = time.time() - (folder / _REMOVING).stat().st_mtime
    except FileNotFoundError:
        return False
    return age_s < _LEFT_BEHIND_S


def _check_there(source: RunDir, name: str) -> None:
    where = str(source.checkpoints / name)
    if parse_checkpoint_name(name) is None or not (source.checkpoints / name).is_dir():
        raise NotFoundError(
            f"there is no checkpoint {name}", where=where, fix="list those that are there, and name one"
        )
    if PosixStore(source.checkpoints).manifest(name) is None:
        raise IncompleteError(f"checkpoint {name} is not complete", where=where, fix="choose one that is")


def _folder(run: RunDir, name: str) -> Path:
    return run.checkpoints / FOLDER / name


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnreadableError(
            f"cannot tell which runs refer to checkpoints: {error.strerror}",
            where=str(folder),
            fix="check that the shared file system is mounted and that this user may read it",
        ) from error


def _refs(run: RunDir, name: str) -> Iterator[Ref]:
    folder = _folder(run, name)
    for file in sorted(_listed(folder)):
        if file.endswith(".json") and not file.startswith("."):
            yield _read(name, folder / file)


def _read(name: str, file: Path) -> Ref:
    """Read one ref. What cannot be read or understood counts: a checkpoint too many costs less than one too few."""
    try:
        record = json.loads(file.read_bytes())
        path, since = Path(record["run"]), float(record["time"])
    except FileNotFoundError:
        return Ref(name=name, run=None, time=0.0, counts=False)  # taken back just now
    except (OSError, ValueError, KeyError, TypeError):
        return Ref(name=name, run=None, time=0.0, counts=True)
    return Ref(name=name, run=path, time=since, counts=_exists(path))


def _exists(path: Path) -> bool:
    """Return whether a run directory exists; one that cannot be asked for (EACCES, EIO) counts as existing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # ValueError: no path at all, but somebody meant one
        return True
    return True
