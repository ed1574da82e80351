"""Copies of 64-bit ELF programs that load another root's dynamic loader and libraries by themselves.

Slurm's daemons start themselves again through /proc/self/exe, so they cannot be started as an argument of a loader.
The copy has another interpreter path (PT_INTERP) and another library path (DT_RUNPATH made DT_RPATH, which also holds
for the libraries' own libraries), each written over the old string, so neither may be longer. Layout: man 5 elf.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from pctool.errors import SlurmError

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 5, 15, 29
_IDENT = b"\x7fELF\x02\x01"  # 64 bit, little-endian


def relocated(program: bytes, *, loader: str, libraries: str) -> bytes:
    """Return the program with this interpreter and this library path; raise SlurmError if it cannot be done."""
    if program[:6] != _IDENT:
        raise SlurmError("not a 64-bit little-endian ELF program")
    image = bytearray(program)
    segments = list(_segments(image))
    for kind, offset, _, _ in segments:
        if kind == _PT_INTERP:
            _overwrite(image, offset, loader)
    tags = list(_dynamic(image, segments))
    strings = next((_file_offset(value, segments) for _, tag, value in tags if tag == _DT_STRTAB), None)
    paths = [(at, value) for at, tag, value in tags if tag in {_DT_RUNPATH, _DT_RPATH}]
    if strings is None or len(paths) != 1:
        raise SlurmError("the program has no library path of its own that could be replaced")
    at, name = paths[0]
    _overwrite(image, strings + name, libraries)
    struct.pack_into("<q", image, at, _DT_RPATH)
    return bytes(image)


def _segments(image: bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Yield (type, offset in the file, address, size in the file) of each program header."""
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for number in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", image, table + number * size)
        yield kind, offset, address, length


def _dynamic(image: bytearray, segments: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in the file, tag, value) of each dynamic entry."""
    for kind, offset, _, length in segments:
        if kind == _PT_DYNAMIC:
            for at in range(offset, offset + length, 16):
                tag, value = struct.unpack_from("<qQ", image, at)
                yield at, tag, value


def _file_offset(address: int, segments: list[tuple[int, int, int, int]]) -> int:
    for kind, offset, start, length in segments:
        if kind == _PT_LOAD and start <= address < start + length:
            return offset + address - start
    raise SlurmError(f"the program has nothing at address {address:#x}")


def _overwrite(image: bytearray, at: int, text: str) -> None:
    """Write a string over the one that stands there."""
    room = image.index(0, at) - at
    new = text.encode()
    if len(new) > room:
        raise SlurmError(f"the path {text} is longer than the {room} bytes there are", fix="use a shorter folder")
    image[at : at + room] = new.ljust(room, b"\0")
