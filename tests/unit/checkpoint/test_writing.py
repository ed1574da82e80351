"""Files are what the memory was, byte for byte, whatever the file system thinks of O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint import writing
from pctool.checkpoint.manifest import describe_file
from pctool.checkpoint.writing import aligned, write_bytes, write_region

CHUNK = 8192


@pytest.fixture
def memory() -> memoryview:
    region = mmap.mmap(-1, 16 * CHUNK)  # a traceback may keep a view of it for longer than the test
    region[:] = random.Random(1).randbytes(len(region))
    return memoryview(region)


@pytest.mark.parametrize("size", [0, 1, 511, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 4095])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_what_the_memory_was(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch, size: int, direct: bool
) -> None:
    monkeypatch.setattr(writing, "CHUNK", CHUNK)
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10 * CHUNK)  # what lay there before is gone
    entry = write_region(memory, size, path)
    assert path.read_bytes() == memory[:size]
    assert entry == describe_file(path)


def test_where_direct_writes_are_refused_they_go_through_the_cache(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some FUSE file systems do: at the open, or at the first write."""
    real_open, real_pwrite = os.open, os.pwrite

    def no_open(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *rest)

    def no_pwrite(fd: int, data: Any, offset: int) -> int:
        if writing._is_direct(fd):
            raise OSError(errno.EINVAL, "no direct write")
        return real_pwrite(fd, data, offset)

    for name, refuses in (("open", no_open), ("pwrite", no_pwrite)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuses)
            entry = write_region(memory, CHUNK + 7, tmp_path / name)
        assert (tmp_path / name).read_bytes() == memory[: CHUNK + 7]
        assert entry == describe_file(tmp_path / name)


def test_a_write_that_was_done_in_part_is_gone_on_with(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: min(len(data), 1000)], offset))
    monkeypatch.setattr(writing, "_is_direct", lambda _: False)
    monkeypatch.setattr(os, "O_DIRECT", 0)
    write_region(memory, 3 * CHUNK, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == memory[: 3 * CHUNK]


def test_an_error_names_the_file(tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_region(memory, CHUNK, tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_small_file(tmp_path: Path) -> None:
    assert write_bytes(b"abc", tmp_path / "small") == describe_file(tmp_path / "small")
    assert aligned(0) == 0
    assert aligned(4097) == 8192
