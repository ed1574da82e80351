"""The checkpoints of a run on S3: <store>/<name of the run directory>/checkpoints/<checkpoint>/<file>."""

from __future__ import annotations

from pathlib import Path

from pctool.aws.s3 import S3, S3CorruptError, S3NotThereError
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.stores import check_file, order, published_by_another
from pctool.errors import IncompleteError
from pctool.run.layout import fsync_dir, parse_checkpoint_name


class S3Store:
    """The S3 tier. Two runs may share a store as long as they differ in `run_name`, which `store_key` gives."""

    tier = "s3"

    def __init__(self, url: str, run_name: str, *, s3: S3 | None = None) -> None:
        self.s3 = s3 or S3(url)
        self.root = f"{run_name}/checkpoints"

    @property
    def where(self) -> str:
        """Return the s3:// address of the run's checkpoints."""
        return f"{self.s3.url}/{self.root}"

    def names(self) -> list[str]:
        """Return the names of all checkpoint folders, oldest first."""
        return sorted((name for name in self.s3.folders(self.root) if parse_checkpoint_name(name)), key=order)

    def manifest(self, name: str) -> bytes | None:
        """Return MANIFEST's bytes, None if there is none."""
        return self.s3.read(f"{self.root}/{name}/{mf.NAME}")

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size of every file by name."""
        return self.s3.sizes(f"{self.root}/{name}")

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        """Store one data file. One that S3 keeps already, size and checksum alike, is not sent again."""
        key = f"{self.root}/{name}/{file}"
        kept = self.s3.stored(key)
        if kept is not None and (kept.size, kept.crc64nvme) == (entry.size, entry.crc64nvme):
            return
        check_file(source, entry)
        self.s3.put_file(key, source, entry.crc64nvme)

    def publish(self, name: str, data: bytes) -> None:
        """Write MANIFEST if none is there. If the same is there, an answer to us was lost: that is fine."""
        key = f"{self.root}/{name}/{mf.NAME}"
        if not self.s3.put_new(key, data) and self.s3.read(key) != data:
            raise published_by_another(f"{self.s3.url}/{key}")

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Download one data file."""
        try:
            self.s3.download(f"{self.root}/{name}/{file}", target)
        except (S3CorruptError, S3NotThereError) as error:
            raise IncompleteError(error.what, where=error.where) from error
        fsync_dir(target.parent)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        folder = f"{self.root}/{name}"
        self.s3.delete([f"{folder}/{mf.NAME}"])
        self.s3.delete(f"{folder}/{file}" for file in sorted(self.s3.sizes(folder)))
