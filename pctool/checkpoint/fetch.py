"""Bring a checkpoint from S3 to the shared file system, so that a run can go on there or go on again.

Data files first, several at a time, each proved byte by byte; MANIFEST last. Whenever this ends in between, what is
there is incomplete, and the next try fetches only what is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.foreign import with_other_contents
from pctool.checkpoint.lineage import own_candidates
from pctool.checkpoint.listing import look_at
from pctool.checkpoint.stores import Store, check_file, order
from pctool.checkpoint.target import Target, nothing_there
from pctool.checkpoint.verify import Tell
from pctool.errors import IncompleteError, UsageError
from pctool.run.layout import RunDir, fsync_dir, write_atomic

FILES_AT_ONCE = 8
_SPARE = 64 << 20  # bytes that stay free: a file system that is full to the last block fails everybody


class NoRoomError(UsageError):
    """What is to be written does not fit where it is to go."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A checkpoint that is whole in `folder`; `fetched` are the files that came from S3, `bytes` what they have."""

    name: str
    folder: Path
    manifest: mf.Manifest
    fetched: tuple[str, ...]
    bytes: int


def choose(source: Target, run: RunDir | None = None) -> str:
    """Return the checkpoint on S3 to bring: the one that is named, or the newest that is complete there.

    With `run` only what that run may go on from without a word of its owner: raises ForeignCheckpointError. Raises
    NotFoundError where there is none, AwsError where S3 cannot be read.
    """
    remote = source.stores[-1]
    names = sorted(remote.names(), key=order, reverse=True)
    if source.name is not None:
        if source.name not in names:
            raise nothing_there(source, names)
        return source.name
    if run is not None:
        offers = own_candidates(run, [remote], source.events())
        found = next((offer.name for offer in offers if offer.tiers), None)
    else:
        found = next((name for name in names if look_at(remote, name).verdict.ok), None)
    if found is None:
        raise (
            nothing_there(source)
            if not names
            else IncompleteError(
                f"none of the {len(names)} checkpoints there is complete",
                where=remote.where,
                fix=f"see what is wrong with them: pctool ckpt ls {remote.where}",
            )
        )
    return found


def fetch(remote: Store, name: str, into: Path, *, tell: Callable[[mf.Manifest], Tell] | None = None) -> Fetched:
    """Make `into`/NAME a complete checkpoint, as S3 has it; every byte is checked, and what is good is not fetched.

    Raises IncompleteError where S3's is not whole, ForeignCheckpointError where another complete one of this name is
    there already, NoRoomError, AwsError, OSError.
    """
    data, manifest = _whole_on(remote, name)
    folder = into / name
    _refuse_another(folder, data)
    folder.mkdir(parents=True, exist_ok=True)
    meter = tell(manifest) if tell else lambda _: None
    bad = _bad_files(folder, manifest)
    size = sum(manifest.files[file].size for file in bad)
    check_room(into, size)
    meter(manifest.bytes - size)
    if bad:
        _take_back(folder)
        _get_all(remote, folder, manifest, bad, meter)
    _publish(folder, data)
    return Fetched(name=name, folder=folder, manifest=manifest, fetched=tuple(bad), bytes=size)


def check_room(folder: Path, size: int) -> None:
    """Raise NoRoomError unless `size` bytes fit into the file system of `folder`, which need not be there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size and size + _SPARE > free:
        raise NoRoomError(
            f"{size} bytes are to be written and {free} are free",
            where=str(folder),
            fix="make room, or write elsewhere",
        )


def as_json(done: Fetched) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt restore --json`."""
    return {
        "name": done.name,
        "step": done.manifest.step,
        "folder": str(done.folder),
        "files": len(done.manifest.files),
        "fetched": list(done.fetched),
        "bytes": done.bytes,
    }


def _whole_on(remote: Store, name: str) -> tuple[bytes, mf.Manifest]:
    data = remote.manifest(name)
    verdict = mf.judge(data, remote.sizes(name), name=name)
    if data is None or not verdict.ok or verdict.manifest is None:
        raise IncompleteError(
            f"not complete: {verdict.why}",
            where=f"{remote.where}/{name}",
            fix="choose another one with --at; `pctool ckpt ls` lists them",
        )
    return data, verdict.manifest


def _refuse_another(folder: Path, data: bytes) -> None:
    """Raise ForeignCheckpointError where a complete one with other contents has this name."""
    if folder.is_dir() and mf.is_complete(folder).ok and (folder / mf.NAME).read_bytes() != data:
        raise with_other_contents(str(folder))


def _bad_files(folder: Path, manifest: mf.Manifest) -> list[str]:
    """Return the files that are not there byte by byte, the largest first."""
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        faults = pool.map(lambda name: mf.file_fault(folder / name, manifest.files[name]), names)
        return [name for name, fault in zip(names, faults, strict=True) if fault]


def _take_back(folder: Path) -> None:
    """Take a MANIFEST away that vouches for files which are not good: nothing half-made may pass for complete."""
    (folder / mf.NAME).unlink(missing_ok=True)
    fsync_dir(folder)


def _get_all(remote: Store, folder: Path, manifest: mf.Manifest, names: Sequence[str], tell: Tell) -> None:
    def get(name: str) -> None:
        remote.fetch(folder.name, name, folder / name)
        check_file(folder / name, manifest.files[name])
        tell(manifest.files[name].size)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            for _ in pool.map(get, names):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _publish(folder: Path, data: bytes) -> None:
    path = folder / mf.NAME
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)
        fsync_dir(folder.parent)
    verdict = mf.is_complete(folder)
    if not verdict.ok:
        raise IncompleteError(verdict.why, where=str(folder))
