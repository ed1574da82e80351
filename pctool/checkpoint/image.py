"""The image of one rank's data file in host memory: where each entry's bytes lie in it.

torch.distributed.checkpoint keeps each tensor as what torch.save writes: a zip archive of a few hundred bytes around
the raw data. What is around depends on dtype and shape alone, so it is made once (with `skip_data`, which leaves the
data out), and a save copies nothing but the tensors' bytes into their places. The archive's own CRC32 is then that of
the empty archive; torch does not check it when it reads, and MANIFEST's CRC64-NVME covers every byte.

What has no fixed form (numbers, strings, sparse tensors) is serialised at each save and lies behind the tensors.
"""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.serialization import skip_data

_BLOB_ALIGNMENT = 64  # so that the data, at a multiple of 64 in its archive, is aligned for every dtype
_RECORD = b"/data/0"


@dataclass(frozen=True)
class Wrapping:
    """What torch.save puts before and behind the bytes of a tensor."""

    head: bytes
    tail: bytes


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the image: `start` of its archive, `data` of its bytes, in bytes from the begin."""

    index: MetadataIndex
    start: int
    data: int
    bytes: int
    length: int  # of the whole archive


@dataclass(frozen=True)
class Image:
    """The layout of one rank's file. `loose` entries follow behind `fixed` bytes in this order."""

    slots: tuple[Slot, ...]
    loose: tuple[MetadataIndex, ...]
    fixed: int

    def places(self, file: str, lengths: Sequence[int]) -> list[tuple[MetadataIndex, _StorageInfo]]:
        """Return where each entry lies in `file`, as DCP's index has it; `lengths` are those of the loose entries."""
        found = [(slot.index, _StorageInfo(file, slot.start, slot.length)) for slot in self.slots]
        at = self.fixed
        for index, length in zip(self.loose, lengths, strict=True):
            found.append((index, _StorageInfo(file, at, length)))
            at += length
        return found


@lru_cache(maxsize=4096)
def wrapping(dtype: torch.dtype, shape: tuple[int, ...]) -> Wrapping:
    """Return what torch.save writes around a contiguous tensor's bytes."""
    ends: Any = _Ends()
    with skip_data(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.save(torch.empty(shape, dtype=dtype), ends)
    start = _data_start(ends.head)
    behind = ends.size - start - math.prod(shape) * dtype.itemsize
    return Wrapping(bytes(ends.head[:start]), bytes(ends.tail[len(ends.tail) - behind :]))


class _Ends:
    """A file of which only the begin and the end are kept: an archive without data is as large as one with."""

    KEPT = 64 << 10  # bytes; what is around the data takes about two thousand

    def __init__(self) -> None:
        self.head, self.tail, self.size = bytearray(), bytearray(), 0

    def write(self, data: bytes) -> int:
        """Take what comes next."""
        self.head += data[: max(0, self.KEPT - len(self.head))]
        self.tail += data[-self.KEPT :]
        del self.tail[: -self.KEPT]
        self.size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Skip what is left out."""
        if whence != os.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation(f"seek({offset}, {whence})")
        self.write(bytes(min(offset, self.KEPT)))
        self.size += max(0, offset - self.KEPT)
        return self.size

    def flush(self) -> None:
        """Do nothing: it is memory."""


def _data_start(head: bytearray) -> int:
    """Return where the data of the archive's only storage begins: behind its local file header (zip, 4.3.7)."""
    header = head.rindex(b"PK\3\4", 0, head.index(_RECORD))
    name, extra = struct.unpack_from("<HH", head, header + 26)
    return header + 30 + int(name) + int(extra)


def lay_out(items: Iterable[WriteItem], tensors: Iterable[Any]) -> Image:
    """Return the layout of a file that holds the items of a save plan; `tensors` are their values, in order."""
    slots: list[Slot] = []
    loose: list[MetadataIndex] = []
    at = 0
    for item, value in zip(items, tensors, strict=True):
        if item.type == WriteItemType.BYTE_IO or not has_fixed_form(value):
            loose.append(item.index)
            continue
        around, size = wrapping(value.dtype, tuple(value.shape)), value.numel() * value.element_size()
        length = len(around.head) + size + len(around.tail)
        slots.append(Slot(item.index, at, at + len(around.head), size, length))
        at += -(-length // _BLOB_ALIGNMENT) * _BLOB_ALIGNMENT
    return Image(tuple(slots), tuple(loose), at)


def has_fixed_form(value: Any) -> bool:
    """Return whether torch.save of a tensor is the same few bytes around its data each time."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not (value.is_conj() or value.is_neg())
        and type(value) in {torch.Tensor, torch.nn.Parameter}
    )


def serialise(value: Any) -> bytes:
    """Return what torch.save writes of a value; a tensor's storage is cut to what it shows of it."""
    buffer = io.BytesIO()
    torch.save(value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value, buffer)
    return buffer.getvalue()
