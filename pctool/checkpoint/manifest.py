"""The manifest: the file that makes a checkpoint complete, and the one predicate that reads it.

A checkpoint is a folder of torch.distributed.checkpoint files plus MANIFEST, written last. MANIFEST names every file
with its size and its CRC64-NVME in base64, which is the form S3 keeps for the same bytes, so that one number vouches
for a file in memory, on the shared file system and on S3.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pctool import crc64
from pctool.errors import IncompleteError
from pctool.run.layout import checkpoint_name, parse_checkpoint_name

NAME = "MANIFEST"
FORMAT = 1
_CHUNK = 8 << 20  # bytes read at a time: large enough for Lustre's read-ahead, small beside a rank's memory


class UnknownFormatError(IncompleteError):
    """A manifest of a format that this pctool does not read: its checkpoint may be whole all the same."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: its size in bytes, and its CRC64-NVME as S3 writes it (base64, big-endian)."""

    size: int
    crc64nvme: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that is known of a checkpoint.

    `parent` is the checkpoint this one was trained on from (None after a fresh start), `topology` says who trained
    it, `position` where the training stood, `code` and `config` are SHA-256 digests of the script and the job spec.
    """

    run: str
    attempt: int
    step: int
    parent: str | None
    world_size: int
    files: Mapping[str, FileEntry]
    topology: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0  # seconds since the epoch
    code: str = ""
    config: str = ""

    @property
    def bytes(self) -> int:
        """Return the size of all files together."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a checkpoint is complete; if not, `why` names the file and what is wrong with it."""

    ok: bool
    why: str = ""
    manifest: Manifest | None = None
    bad: tuple[str, ...] = ()  # names of the files that are missing or wrong
    unknown_format: bool = False  # cannot be judged, since another pctool wrote it


def crc64nvme(chunks: Iterable[bytes]) -> str:
    """Return the CRC64-NVME of the chunks, one after the other, in the form S3 writes it."""
    update = crc64.function()
    value = 0
    for chunk in chunks:
        value = update(chunk, value)
    return crc64.text(value)


def crc64nvme_file(path: Path) -> str:
    """Return the CRC64-NVME of a file, read in chunks. Raise OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return crc64nvme(iter(lambda: file.read(_CHUNK), b""))


def describe_file(path: Path) -> FileEntry:
    """Return a file's entry for the manifest, from its bytes on the file system."""
    return FileEntry(size=path.stat().st_size, crc64nvme=crc64nvme_file(path))


def encode(manifest: Manifest) -> bytes:
    """Return the text of MANIFEST. It ends with a SHA-256 of the rest, so that a flipped byte in it shows too."""
    # by hand, and without indent: 16,000 files through asdict and json's Python encoder take a second
    record: dict[str, Any] = {"format": FORMAT, **vars(manifest)}
    record["files"] = {
        name: {"size": entry.size, "crc64nvme": entry.crc64nvme} for name, entry in sorted(manifest.files.items())
    }
    return json.dumps({**record, "sha256": _digest(record)}, separators=(",\n", ": ")).encode() + b"\n"


def decode(data: bytes, *, where: str = NAME) -> Manifest:
    """Read a MANIFEST. Raise UnknownFormatError for another format's, IncompleteError saying what is wrong with it."""
    try:
        record = json.loads(data)
        claimed = record.pop("sha256")
        if record.get("format") != FORMAT:
            raise UnknownFormatError(
                f"manifest of format {record.get('format')!r}, this pctool reads {FORMAT}",
                where=where,
                fix="use the pctool version that wrote this checkpoint",
            )
        if _digest(record) != claimed:
            raise IncompleteError("the manifest's own checksum does not match: it was altered", where=where)
        return _from_record(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteError(f"not a manifest: {error}", where=where) from error


def said_run(data: bytes) -> str:
    """Return by which run a MANIFEST says it was saved, "" if it cannot be read."""
    try:
        return decode(data).run
    except IncompleteError:
        return ""


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, None if it has none. Raise IncompleteError for a damaged one, OSError otherwise."""
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode(data, where=str(folder / NAME))


def judge(manifest: bytes | None, sizes: Mapping[str, int], *, name: str | None = None) -> Verdict:
    """Judge a checkpoint by its manifest's bytes and the sizes of the files that are there; on any tier.

    `name` is the folder's: a manifest that says another attempt or step was exchanged, and vouches for nothing here.
    """
    if manifest is None:
        return Verdict(ok=False, why=f"no {NAME}: it was never finished")
    try:
        found = decode(manifest)
    except UnknownFormatError as error:
        return Verdict(ok=False, why=error.what, bad=(NAME,), unknown_format=True)
    except IncompleteError as error:
        return Verdict(ok=False, why=str(error), bad=(NAME,))
    stray = misplaced(found, name)
    if stray:
        return Verdict(ok=False, why=f"{NAME}: {stray}", bad=(NAME,))
    return _verdict(found, size_faults(found, sizes))


def misplaced(manifest: Manifest, name: str | None) -> str:
    """Return what shows that a manifest is not of the checkpoint of this name, or mixes two steps; "" if nothing does.

    A name that is no checkpoint's (a copy, elsewhere) says nothing.
    """
    said = (manifest.attempt, manifest.step)
    if name is not None and parse_checkpoint_name(name) not in {None, said}:
        return f"it is that of checkpoint {checkpoint_name(*said)}"
    step = manifest.position.get("step")
    return "" if step in {None, manifest.step} else f"step {manifest.step} with the position of step {step}"


def size_faults(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return what is wrong with the files by their sizes alone, by name; a file of the right size is not in it."""
    there = {name: sizes.get(name) for name in manifest.files}
    wrong = {name: there[name] for name, entry in manifest.files.items() if there[name] != entry.size}
    return {name: _size_fault(manifest.files[name].size, size) for name, size in wrong.items()}


def is_complete(folder: Path) -> Verdict:
    """Judge a folder by its manifest, file names and sizes: a few file-system calls, no data read.

    This one predicate serves resume, list, prune and mirror. Raises OSError where the folder cannot be read.
    """
    try:
        manifest: bytes | None = (folder / NAME).read_bytes()
    except FileNotFoundError:
        manifest = None
    return judge(manifest, folder_sizes(folder) if manifest is not None else {}, name=folder.name)


def verify(folder: Path) -> Verdict:
    """Judge a folder by every byte of every file. Raises OSError where it cannot be read."""
    verdict = is_complete(folder)
    if not verdict.ok or verdict.manifest is None:
        return verdict
    faults = file_faults(folder, verdict.manifest, verdict.manifest.files)
    return _verdict(verdict.manifest, faults)


def file_faults(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
    """Return what is wrong with the named files of a checkpoint, by name; a good file is not in it."""
    faults = {name: file_fault(folder / name, manifest.files[name]) for name in names}
    return {name: fault for name, fault in faults.items() if fault}


def folder_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each plain file in a folder by name."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}


def _verdict(manifest: Manifest, faults: Mapping[str, str]) -> Verdict:
    why = "; ".join(f"{name}: {fault}" for name, fault in sorted(faults.items()))
    return Verdict(ok=not faults, why=why, manifest=manifest, bad=tuple(sorted(faults)))


def _size_fault(expected: int, found: int | None) -> str:
    if found is None:
        return "missing"
    return "" if found == expected else f"{found} bytes where the manifest says {expected}"


def file_fault(path: Path, entry: FileEntry) -> str:
    """Return what is wrong with a file, "" if every byte is as its entry says."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    if size != entry.size:
        return _size_fault(entry.size, size)
    found = crc64nvme_file(path)
    return "" if found == entry.crc64nvme else f"CRC64-NVME {found} where the manifest says {entry.crc64nvme}"


def _from_record(record: dict[str, Any]) -> Manifest:
    record.pop("format")
    files = {plain_name(name): FileEntry(**entry) for name, entry in record.pop("files").items()}
    return Manifest(**record, files=files)


def plain_name(name: str) -> str:
    """Return a data file's name. Raise ValueError for one that could lead out of its folder."""
    # names come from a file that a stranger may have written: none of them may lead out of the folder
    if not name or "/" in name or name in {".", "..", NAME}:
        raise ValueError(f"file name {name!r}")
    return name


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
