"""Write host memory to a file, durably and fast, with its checksum on the way.

The checksum is of the memory, not of the file: what is read back later is compared with what the rank had.
Large aligned writes past the page cache (O_DIRECT) cost no second copy and leave the cache to the training's data;
where the file system refuses that, the same writes go through the cache.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pctool import crc64
from pctool.checkpoint.manifest import FileEntry

ALIGNMENT = 4096  # of memory, offset and length, for O_DIRECT on any file system in use
CHUNK = 32 << 20  # bytes a write: measured best here among 1 to 32 MiB; a multiple of Lustre's 1 to 16 MiB stripes
_CRC_CHUNK = 4 << 20  # awscrt holds the interpreter's lock for as long as one call takes


def aligned(size: int) -> int:
    """Return `size` rounded up to what O_DIRECT can write."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_region(memory: memoryview, size: int, path: Path) -> FileEntry:
    """Write the first `size` bytes of page-aligned memory to a file, durable on return, and return its entry.

    `memory` reaches up to `aligned(size)`: what lies behind `size` is written and cut off again. Raises OSError.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="crc") as pool:
        checksum = pool.submit(checksum_of, memory[:size])
        fd = _open(path)
        try:
            _write(fd, memory, size, path)
            os.ftruncate(fd, size)
            os.fsync(fd)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(fd)
        return FileEntry(size=size, crc64nvme=_known(checksum))


def write_bytes(data: bytes, path: Path) -> FileEntry:
    """Write a small file, durable on return, and return its entry. Raises OSError."""
    fd = _create(path)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    return FileEntry(size=len(data), crc64nvme=checksum_of(memoryview(data)))


def checksum_of(memory: memoryview) -> str:
    """Return the CRC64-NVME of memory in the form S3 writes it."""
    update, value = crc64.function(), 0
    for start in range(0, len(memory), _CRC_CHUNK):
        value = update(memory[start : start + _CRC_CHUNK], value)
    return crc64.text(value)


def _known(checksum: Future[str]) -> str:
    return checksum.result()


def _open(path: Path) -> int:
    try:
        return _create(path, os.O_DIRECT)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        return _create(path)  # tmpfs before 6.6, some FUSE


def _create(path: Path, flags: int = 0) -> int:
    """Make a new file, also where one is left of a save that failed: who still writes to that one does no harm."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)


def _write(fd: int, memory: memoryview, size: int, path: Path) -> None:
    end, at = aligned(size), 0
    if end > len(memory):
        raise OSError(errno.EFAULT, f"the memory to be written has {len(memory)} bytes, not {end}", str(path))
    while at < end:
        try:
            at += os.pwrite(fd, memory[at : min(at + CHUNK, end)], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(fd):
                raise
            _go_through_the_cache(fd)
            continue
        if at % ALIGNMENT and _is_direct(fd):
            _go_through_the_cache(fd)  # a short write (a full disk) left an offset that O_DIRECT cannot go on from


def _is_direct(fd: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _go_through_the_cache(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
