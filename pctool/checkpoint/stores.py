"""Where checkpoints live: one Protocol, implemented on a posix path and on S3."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from pctool.checkpoint import manifest as mf
from pctool.errors import FencedError, IncompleteError, PctoolError
from pctool.run.layout import RunDir, fsync_dir, parse_checkpoint_name, write_atomic

_TASK = re.compile(r"task-\d+")  # as pctool.job.array names them


class StoreUnreadableError(PctoolError):
    """A tier of checkpoints cannot be read: that is never the same as "there are none"."""

    exit_code = 3


class Store(Protocol):
    """One tier of checkpoints.

    Readers call `names`, then `manifest` and `sizes` of a name, then `fetch` its files. A writer calls `put` for each
    file and `publish` last. `remove` takes the manifest away first. Readers raise StoreUnreadableError (posix) or
    AwsError (S3) where the tier cannot be reached: nothing is reported as absent because it could not be asked for.
    """

    tier: str

    @property
    def where(self) -> str:
        """Return the address of the tier, for messages."""

    def names(self) -> list[str]:
        """Return the names of all checkpoint folders, complete or not, oldest first."""

    def manifest(self, name: str) -> bytes | None:
        """Return MANIFEST's bytes, None if there is none."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size of every file by name."""

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        """Copy one data file into the store. Raise IncompleteError if `source` is not what `entry` says."""

    def publish(self, name: str, data: bytes) -> None:
        """Write MANIFEST if none is there. Raise FencedError if another one is."""

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Copy one data file out of the store to `target`, which appears whole or not at all.

        Raises IncompleteError if the store's copy is missing or known to be damaged.
        """

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""


class PosixStore:
    """The checkpoints in a run directory."""

    tier = "posix"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def where(self) -> str:
        """Return the folder's path."""
        return str(self.folder)

    def names(self) -> list[str]:
        """Return the names of all checkpoint folders, oldest first; [] if the folder does not exist."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.folder, error) from error
        return sorted((name for name in names if parse_checkpoint_name(name)), key=order)

    def manifest(self, name: str) -> bytes | None:
        """Return MANIFEST's bytes, None if there is none."""
        try:
            return (self.folder / name / mf.NAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(self.folder / name, error) from error

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size of every file by name; {} if the folder is gone."""
        try:
            return mf.folder_sizes(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise unreadable(self.folder / name, error) from error

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        """Copy a file in, durably."""
        check_file(source, entry)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        copy_whole(source, folder / file)

    def publish(self, name: str, data: bytes) -> None:
        """Write MANIFEST if none is there: temp file, fsync, rename, fsync of the folder.

        Where that fails none is left: what is told to have failed must not pass for complete later.
        """
        folder = self.folder / name
        found = self.manifest(name)
        if found is None:
            try:
                write_atomic(folder / mf.NAME, data)
                fsync_dir(self.folder)
            except OSError:
                (folder / mf.NAME).unlink(missing_ok=True)
                raise
        elif found != data:
            raise published_by_another(str(folder / mf.NAME))

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Copy a file out."""
        try:
            copy_whole(self.folder / name / file, target)
        except FileNotFoundError as error:
            raise IncompleteError("missing", where=str(self.folder / name / file)) from error

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so that a crash on the way leaves it incomplete, never damaged."""
        folder = self.folder / name
        (folder / mf.NAME).unlink(missing_ok=True)
        if folder.is_dir():
            fsync_dir(folder)
            shutil.rmtree(folder)


def order(name: str) -> tuple[int, int]:
    """Return the sort key of a checkpoint's name: (attempt, step)."""
    return parse_checkpoint_name(name) or (-1, -1)


def unreadable(path: Path, error: OSError) -> StoreUnreadableError:
    """Return the error for a tier that cannot be read."""
    return StoreUnreadableError(
        f"cannot be read: {error.strerror or error}",
        where=str(path),
        fix="check that the shared file system is mounted and that this user may read it",
    )


def published_by_another(where: str) -> FencedError:
    """Return the error for a MANIFEST that holds other bytes than ours."""
    return FencedError(
        "another attempt has published a checkpoint of this name with other contents",
        where=where,
        fix="give each run its own run directory and store prefix",
    )


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file so that `target` appears whole or not at all, and durably."""
    part = target.with_name(f"{target.name}.part")
    with source.open("rb") as reader, part.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 8 << 20)
        writer.flush()
        os.fsync(writer.fileno())
    part.rename(target)
    fsync_dir(target.parent)


def open_stores(run: RunDir, store: str | None) -> list[Store]:
    """Return the tiers of a run: the run directory, and S3 where `store` (s3://bucket/prefix) is given."""
    stores: list[Store] = [PosixStore(run.checkpoints)]
    if store:
        from pctool.checkpoint.s3store import S3Store

        stores.append(S3Store(store, store_key(run)))
    return stores


def store_key(run: RunDir) -> str:
    """Return under which name a run lies in its store: its directory's, for a task of an array after its parent's.

    The directories of tasks are called alike in every array, so their own names alone would not do.
    """
    path = run.path.absolute()
    return f"{path.parent.name}/{path.name}" if _TASK.fullmatch(path.name) else path.name


def check_file(path: Path, entry: mf.FileEntry) -> None:
    """Raise IncompleteError if a file is not, byte for byte, what its entry says."""
    fault = mf.file_fault(path, entry)
    if fault:
        raise IncompleteError(fault, where=str(path))
