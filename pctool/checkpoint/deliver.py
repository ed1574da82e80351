"""How a checkpoint gets from the run directory to S3: the engine copies it, or FSx for Lustre exports it by itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from pctool.aws.s3parts import together
from pctool.checkpoint.foreign import with_other_contents
from pctool.checkpoint.manifest import NAME, FileEntry, Manifest
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import Store
from pctool.errors import AwsError
from pctool.spec.job import MIRROR_WAYS

FILES_AT_ONCE = 16  # small files: as many as parts go at once; of large ones only the parts are in memory
COPY, DRA = MIRROR_WAYS
_SHOWN = 3  # files that a message names


class NotExportedError(AwsError):
    """FSx has not, or not rightly, exported all of a checkpoint yet."""


class Delivery(Protocol):
    """One way to S3. `files` comes first, `publish` last.

    `removes`: what lies on S3 was put there by us, so that what is not kept is ours to remove.
    """

    removes: bool

    def files(self, name: str, folder: Path, manifest: Manifest, check: Callable[[], None]) -> None:
        """See every data file to S3, whole. `check` is called before each and raises where that is to end."""

    def publish(self, name: str, data: bytes) -> None:
        """See MANIFEST to S3, whose bytes are `data`."""


class Copy:
    """Copy the files, several at a time, and write MANIFEST on the condition that none is there."""

    removes = True

    def __init__(self, remote: Store) -> None:
        self._remote = remote

    def files(self, name: str, folder: Path, manifest: Manifest, check: Callable[[], None]) -> None:
        """Copy every data file. What fails keeps the others from being begun."""

        def copier(file: str, entry: FileEntry) -> Callable[[], None]:
            def copy() -> None:
                check()
                self._remote.put(name, file, folder / file, entry)

            return copy

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            together(pool, [copier(file, entry) for file, entry in sorted(manifest.files.items())])

    def publish(self, name: str, data: bytes) -> None:
        """Write MANIFEST. Raise FencedError if another one is there."""
        self._remote.publish(name, data)


class Exported:
    """Verify what FSx's data repository association has exported. Nothing is written, and nothing removed.

    FSx exports in no order, and what it uploads may carry no CRC64-NVME of the whole object: then the object is read
    back. Raises NotExportedError, saying what is missing, until all is there.
    """

    removes = False

    def __init__(self, remote: S3Store) -> None:
        self._remote = remote
        self._read: dict[tuple[str, str, str], str] = {}  # (checkpoint, file, ETag) -> its CRC: read back once

    def files(self, name: str, folder: Path, manifest: Manifest, check: Callable[[], None]) -> None:
        """Compare size and checksum of every data file with the manifest's."""
        sizes = self._remote.sizes(name)
        faults = {file: _size_fault(entry.size, sizes.get(file)) for file, entry in manifest.files.items()}
        if not any(faults.values()):
            faults = self._faults(name, manifest, check)
        missing = {file: fault for file, fault in sorted(faults.items()) if fault}
        if missing:
            raise self._late(name, [f"{file}: {fault}" for file, fault in missing.items()], len(manifest.files))

    def publish(self, name: str, data: bytes) -> None:
        """Compare MANIFEST with ours."""
        found = self._remote.manifest(name)
        if found is None:
            raise self._late(name, [NAME], 1)
        if found != data:
            raise with_other_contents(f"{self._remote.where}/{name}")

    def _faults(self, name: str, manifest: Manifest, check: Callable[[], None]) -> dict[str, str]:
        def looker(file: str, entry: FileEntry) -> Callable[[], str]:
            def look() -> str:
                check()
                return self._fault(name, file, entry)

            return look

        names = sorted(manifest.files)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            found = together(pool, [looker(file, manifest.files[file]) for file in names])
        return dict(zip(names, found, strict=True))

    def _fault(self, name: str, file: str, entry: FileEntry) -> str:
        kept = self._remote.stored(name, file)
        if kept is None or kept.size != entry.size:
            return _size_fault(entry.size, kept.size if kept else None)
        value = kept.crc64nvme
        if value is None:
            seen = (name, file, kept.etag)
            if seen not in self._read:
                self._read[seen] = self._remote.s3.checksum(self._remote.key(name, file), kept)
            value = self._read[seen]
        return "" if value == entry.crc64nvme else f"CRC64-NVME {value} where the manifest says {entry.crc64nvme}"

    def _late(self, name: str, missing: list[str], of: int) -> NotExportedError:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return NotExportedError(
            f"FSx has not exported {len(missing)} of {of} yet: {', '.join(missing[:_SHOWN])}{more}",
            where=f"{self._remote.where}/{name}",
            fix="it is looked for again later; if this stays, look at the data repository association's export policy",
        )


def _size_fault(expected: int, found: int | None) -> str:
    if found is None:
        return "missing"
    return "" if found == expected else f"{found} bytes where the manifest says {expected}"


def delivery_of(way: str, remote: S3Store) -> Delivery:
    """Return the way to S3 of this name, one of MIRROR_WAYS."""
    return Exported(remote) if way == DRA else Copy(remote)
