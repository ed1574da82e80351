"""The checkpoints of a run on S3: <store>/<name of the run directory>/checkpoints/<checkpoint>/<file>."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pctool.aws.s3 import S3, OpenUpload, S3CorruptError, S3NotThereError, Stored
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.stores import order, published_by_another
from pctool.errors import IncompleteError
from pctool.run.layout import fsync_dir, parse_checkpoint_name

READS_AT_ONCE = 16  # MANIFESTs that an overview reads at a time


class S3Store:
    """The S3 tier. Two runs may share a store as long as they differ in `run_name`, which `store_key` gives."""

    tier = "s3"

    def __init__(self, url: str, run_name: str, *, s3: S3 | None = None) -> None:
        self.s3 = s3 or S3(url)
        self.root = f"{run_name}/checkpoints"
        self._lock = threading.Lock()
        self._begun: _Begun | None = None

    @property
    def where(self) -> str:
        """Return the s3:// address of the run's checkpoints."""
        return f"{self.s3.url}/{self.root}"

    def names(self) -> list[str]:
        """Return the names of all checkpoint folders, oldest first. One request for each 1,000."""
        return sorted((name for name in self.s3.folders(self.root) if parse_checkpoint_name(name)), key=order)

    def manifest(self, name: str) -> bytes | None:
        """Return MANIFEST's bytes, None if there is none."""
        return self.s3.read(self.key(name, mf.NAME))

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size of every file by name. One request for each 1,000."""
        return self.s3.sizes(f"{self.root}/{name}")

    def overview(self) -> dict[str, bytes | None]:
        """Return MANIFEST's bytes (None: there is none) of all checkpoints by name, oldest first.

        That is all a listing costs: one request for each 1,000 names, and one for each MANIFEST. The files' sizes are
        not asked for, which would be two more for each checkpoint of 1,024 files: a MANIFEST of the mirror's is
        published only after S3 has said size and checksum of each. `judge` with `sizes` looks at what is there now.
        """
        names = self.names()
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self.manifest, names), strict=True))

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        """Store one data file. What S3 keeps already, size and checksum alike, is not sent again, a part neither."""
        key, begun = self.key(name, file), self._survey(name)
        if begun.sizes.get(file) == entry.size and self._keeps(key, entry):
            return
        try:
            upload = begun.upload(file) if entry.size > self.s3.part_bytes else None
            self.s3.put_file(key, source, entry.size, entry.crc64nvme, upload=upload)
        except BaseException:
            self._forget()  # the next try looks at what this one left
            raise

    def publish(self, name: str, data: bytes) -> None:
        """Write MANIFEST if none is there. If the same is there, an answer to us was lost: that is fine."""
        key = self.key(name, mf.NAME)
        if not self.s3.put_new(key, data) and self.s3.read(key) != data:
            raise published_by_another(f"{self.s3.url}/{key}")
        self._forget()

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Download one data file, in ranges, several at a time."""
        try:
            self.s3.download(self.key(name, file), target)
        except (S3CorruptError, S3NotThereError) as error:
            raise IncompleteError(error.what, where=error.where) from error
        fsync_dir(target.parent)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        folder = f"{self.root}/{name}"
        self.s3.delete([f"{folder}/{mf.NAME}"])
        self.s3.delete(f"{folder}/{file}" for file in sorted(self.s3.sizes(folder)))
        self._forget()

    def begun(self) -> dict[str, list[OpenUpload]]:
        """Return the uploads that were begun and not ended, by checkpoint."""
        found: dict[str, list[OpenUpload]] = {}
        for upload in self.s3.uploads(self.root):
            name = upload.key[len(self.root) + 1 :].partition("/")[0]
            found.setdefault(name, []).append(upload)
        return found

    def abort(self, upload: OpenUpload) -> None:
        """Drop an upload that `begun` returned; one that is gone is no error."""
        self.s3.abort(upload)

    def stored(self, name: str, file: str) -> Stored | None:
        """Return what S3 says of one file, None if it is not there."""
        return self.s3.stored(self.key(name, file))

    def key(self, name: str, file: str) -> str:
        """Return the key of a file, relative to the store's address."""
        return f"{self.root}/{name}/{file}"

    def _keeps(self, key: str, entry: mf.FileEntry) -> bool:
        kept = self.s3.stored(key)
        return kept is not None and (kept.size, kept.crc64nvme) == (entry.size, entry.crc64nvme)

    def _survey(self, name: str) -> _Begun:
        """Return what is there of a checkpoint, asked for once and not for each of its files."""
        with self._lock:
            if self._begun is None or self._begun.name != name:
                self._begun = _Begun(self.s3, self.root, name)
            return self._begun

    def _forget(self) -> None:
        with self._lock:
            self._begun = None


class _Begun:
    """What S3 had of a checkpoint when its copy was begun, or gone on with."""

    def __init__(self, s3: S3, root: str, name: str) -> None:
        self.name = name
        self.sizes = s3.sizes(f"{root}/{name}")
        self._s3 = s3
        self._folder = f"{root}/{name}"
        self._lock = threading.Lock()
        self._uploads: dict[str, str] | None = None

    def upload(self, file: str) -> str | None:
        """Return the id of the newest open upload of a file that can be gone on with, None if there is none."""
        with self._lock:
            if self._uploads is None:
                ours = [upload for upload in self._s3.uploads(self._folder) if upload.algorithm == "CRC64NVME"]
                self._uploads = {upload.key[len(self._folder) + 1 :]: upload.id for upload in reversed(ours)}
            return self._uploads.get(file)
