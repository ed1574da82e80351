"""Compute the checksums of objects on S3 from their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pctool.checkpoint.s3store import S3Store

FILES_AT_ONCE = 4


def sums(store: S3Store, name: str, sizes: Mapping[str, int], tell: Callable[[int], None]) -> dict[str, str]:
    """Return the CRC64-NVME of each file's bytes as S3 delivers them, "missing" for one that has gone."""

    def read(file: str) -> str:
        kept = store.stored(name, file)
        if kept is None:
            return "missing"
        found = store.s3.checksum(store.key(name, file), kept)
        tell(kept.size)
        return found

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            return dict(zip(sizes, pool.map(read, sizes), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
