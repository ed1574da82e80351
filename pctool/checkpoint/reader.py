"""Read a checkpoint and believe no byte of it before it is proven.

Each data file is read once, from its begin to its end; its checksum is computed while the next chunk is being read, and
each entry goes into its tensor as soon as it is there. A file that turns out damaged raises; what was loaded by then is
overwritten by what is loaded instead. The index is proven before it is unpickled.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future as TorchFuture

from pctool.aws import crc64
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.image import wrapping
from pctool.errors import IncompleteError

CHUNK = 16 << 20  # bytes a read
METADATA = ".metadata"


class DamagedFileError(IncompleteError):
    """A file of a checkpoint is not what its manifest says."""


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file: one entry, or what lies between (`items` empty)."""

    start: int
    length: int
    items: tuple[ReadItem, ...] = ()


class VerifiedReader(FileSystemReader):
    """DCP's reader of one folder, file by file. `verified` names what has been proven."""

    def __init__(self, folder: Path, manifest: mf.Manifest) -> None:
        super().__init__(folder)
        self.folder, self.manifest = folder, manifest
        self.verified: set[str] = set()
        self._metadata: Metadata | None = None

    def bytes_of(self, name: str) -> bytes | None:
        """Return a small file's bytes, proven; None if it is not of this checkpoint. Raises DamagedFileError."""
        entry = self.manifest.files.get(name)
        if entry is None:
            return None
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise self._damaged(name, "missing") from None
        self._prove(name, len(data), mf.crc64nvme([data]))
        return data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's index. Raises DamagedFileError."""
        if self._metadata is None:
            data = self.bytes_of(METADATA)
            if data is None:
                raise self._damaged(METADATA, "not in the manifest")
            found: Metadata = pickle.loads(data)
            self._metadata = found
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Load what the plan asks for. Raises DamagedFileError, OSError."""
        by_file: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, {}).setdefault((place.offset, place.length), []).append(item)
        with ThreadPoolExecutor(1, thread_name_prefix="read") as pool:
            for name, entries in sorted(by_file.items()):
                self._read_file(name, entries, planner, pool)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _read_file(
        self, name: str, entries: dict[tuple[int, int], list[ReadItem]], planner: LoadPlanner, pool: ThreadPoolExecutor
    ) -> None:
        entry = self.manifest.files.get(name)
        if entry is None:
            raise self._damaged(name, "not in the manifest")
        try:
            file = (self.folder / name).open("rb", buffering=0)
        except FileNotFoundError:
            raise self._damaged(name, "missing") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                raise self._damaged(name, f"{size} bytes where the manifest says {entry.size}")
            update, value = crc64.function(), 0
            for piece, part, whole in _stream(file.fileno(), _pieces(entries, size), pool):
                value = update(part, value)
                if whole is not None:
                    self._deliver(piece, whole, planner)
        self._prove(name, size, crc64.text(value))

    def _deliver(self, piece: _Piece, data: memoryview, planner: LoadPlanner) -> None:
        for item in piece.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            tensor = self._tensor(item, data)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if length != tensor.shape[dim]:  # a sparse one is always whole, and cannot be narrowed
                    tensor = tensor.narrow(dim, offset, length)
            target = planner.resolve_tensor(item)
            with torch.no_grad():  # what `detach` makes of a sparse tensor is another one: nothing would be loaded
                target.copy_(tensor)
            planner.commit_tensor(item, target)

    def _tensor(self, item: ReadItem, data: memoryview) -> torch.Tensor:
        """Return an entry's tensor: a view of `data` where it is stored as we store it."""
        place = self.storage_data[item.storage_index]
        if place.transform_descriptors:
            stream = self.transforms.transform_load_stream(item, place.transform_descriptors, io.BytesIO(data))
            loaded: torch.Tensor = torch.load(io.BytesIO(stream.read(-1)), map_location="cpu", weights_only=True)
            return loaded
        view = self._view(item, data)
        return view if view is not None else torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def _view(self, item: ReadItem, data: memoryview) -> torch.Tensor | None:
        known = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        if not isinstance(known, TensorStorageMetadata) or known.properties.layout != torch.strided:
            return None
        offset = item.storage_index.offset
        shape = next((tuple(chunk.sizes) for chunk in known.chunks if offset in {None, chunk.offsets}), None)
        if shape is None or math.prod(shape) == 0:
            return None
        dtype, around = known.properties.dtype, wrapping(known.properties.dtype, shape)
        count = math.prod(shape)
        if len(data) != len(around.head) + count * dtype.itemsize + len(around.tail):
            return None
        if data[: len(around.head)] != around.head:
            return None  # another torch wrote it: its own reader knows
        return torch.frombuffer(data, dtype=dtype, count=count, offset=len(around.head)).view(shape)

    def _prove(self, name: str, size: int, crc: str) -> None:
        entry = self.manifest.files[name]
        if (size, crc) != (entry.size, entry.crc64nvme):
            raise self._damaged(name, f"{size} bytes with CRC64-NVME {crc} where the manifest says {entry}")
        self.verified.add(name)

    def _damaged(self, name: str, why: str) -> DamagedFileError:
        return DamagedFileError(f"{name}: {why}", where=str(self.folder))


def _pieces(entries: dict[tuple[int, int], list[ReadItem]], size: int) -> list[_Piece]:
    """Return the stretches of a file in order: entries, and what lies between, in chunks."""
    pieces: list[_Piece] = []
    at = 0
    for (start, length), items in sorted(entries.items()):
        pieces += [_Piece(gap, min(CHUNK, start - gap)) for gap in range(at, start, CHUNK)]
        pieces.append(_Piece(start, length, tuple(items)))
        at = start + length
    return pieces + [_Piece(gap, min(CHUNK, size - gap)) for gap in range(at, size, CHUNK)]


def _stream(
    fd: int, pieces: list[_Piece], pool: ThreadPoolExecutor
) -> Iterator[tuple[_Piece, memoryview, memoryview | None]]:
    """Yield (piece, the next part of it, the whole of it once it is all there), reading one part ahead.

    Two buffers take turns, so that the next entry is being read while this one is in use.
    """
    buffers = [bytearray(), bytearray()]
    parts = _parts(pieces)
    ahead: Future[memoryview] | None = None
    current = next(parts, None)
    if current is not None:
        ahead = pool.submit(_read_part, fd, current, buffers)
    while current is not None and ahead is not None:
        part = ahead.result()
        done, current = current, next(parts, None)
        if current is not None:
            ahead = pool.submit(_read_part, fd, current, buffers)
        piece, turn, at, length = done
        whole = at + length == piece.length
        yield piece, part, memoryview(buffers[turn])[: piece.length] if whole else None


_Part = tuple[_Piece, int, int, int]  # piece, buffer, offset in the piece, length


def _parts(pieces: list[_Piece]) -> Iterator[_Part]:
    for number, piece in enumerate(pieces):
        for at in range(0, piece.length, CHUNK):
            yield piece, number % 2, at, min(CHUNK, piece.length - at)


def _read_part(fd: int, part: _Part, buffers: list[bytearray]) -> memoryview:
    piece, turn, at, length = part
    if len(buffers[turn]) < piece.length:
        buffers[turn] = bytearray(piece.length)  # a view of the one before keeps it for as long as it is in use
    view = memoryview(buffers[turn])[at : at + length]
    read = 0
    while read < length:
        count = os.preadv(fd, [view[read:]], piece.start + at + read)
        if count == 0:
            raise OSError(f"the file ended at {piece.start + at + read} bytes")
        read += count
    return view
