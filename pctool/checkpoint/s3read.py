"""Compute the checksums of objects on S3 from their bytes, in one pipeline of ranges over all files.

So a checkpoint of few large objects is read by as many streams as one of many small ones, and what is held in memory
is bounded: RANGES_AT_ONCE ranges, whatever the sizes. Ranges come back in order, since a CRC has to be fed in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pctool.aws.ranges import RANGE_BYTES, read_range
from pctool.aws.s3 import S3NotThereError
from pctool.checkpoint.manifest import crc_function, sum_text
from pctool.checkpoint.s3store import S3Store

RANGES_AT_ONCE = 16  # 256 MiB in memory


class _Range(NamedTuple):
    file: str
    start: int
    length: int


def sums(store: S3Store, name: str, sizes: Mapping[str, int], tell: Callable[[int], None]) -> dict[str, str]:
    """Return the CRC64-NVME of each file's bytes as S3 delivers them, "missing" for one that has gone."""
    states: dict[str, int | None] = dict.fromkeys(sizes, 0)
    feed = crc_function()
    for part, data in _read_in_order(store, name, sizes):
        state = states[part.file]
        states[part.file] = None if data is None or state is None else feed(data, state)
        tell(len(data or b""))
    return {file: "missing" if state is None else sum_text(state) for file, state in states.items()}


def _read_in_order(store: S3Store, name: str, sizes: Mapping[str, int]) -> Iterator[tuple[_Range, bytes | None]]:
    def read(part: _Range) -> bytes | None:
        try:
            return read_range(store.s3, f"{store.root}/{name}/{part.file}", part.start, part.length)
        except S3NotThereError:
            return None

    under_way: deque[tuple[_Range, Future[bytes | None]]] = deque()
    with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
        try:
            for part in _ranges(sizes):
                under_way.append((part, pool.submit(read, part)))
                if len(under_way) >= RANGES_AT_ONCE:
                    done, future = under_way.popleft()
                    yield done, future.result()
            while under_way:
                done, future = under_way.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _ranges(sizes: Mapping[str, int]) -> Iterator[_Range]:
    for file, size in sizes.items():
        for start in range(0, size, RANGE_BYTES):
            yield _Range(file, start, min(RANGE_BYTES, size - start))
