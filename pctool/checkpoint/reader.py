"""Read a checkpoint and believe no byte of it before it is proven.

Each data file is read once, from its begin to its end, and its checksum is computed while what follows is being read.
A tensor in host memory that gets all of an entry is read straight into its place; others go through a buffer. A file
that turns out damaged raises; what was loaded by then is overwritten by what is loaded instead. Nothing is unpickled
before its file is proven: not the index, nor an entry that only torch's own reader knows how to read.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future as TorchFuture

from pctool import crc64
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.image import Wrapping, wrapping
from pctool.errors import IncompleteError

CHUNK = 1 << 20  # bytes a read: still in the processor's cache when its checksum is computed
_AHEAD = 2  # reads ordered ahead, done one after the other: a file system's own read-ahead does the rest
_PARTS_MAX = 1024  # Linux's IOV_MAX
METADATA = ".metadata"


class DamagedFileError(IncompleteError):
    """A file of a checkpoint is not what its manifest says."""


@dataclass(frozen=True)
class _Form:
    """How an entry is stored where it is stored as we store it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    around: Wrapping


@dataclass
class _Piece:
    """A stretch of a file: one entry, or what lies between (`items` empty), and the memory that it is read into."""

    start: int
    length: int
    items: tuple[ReadItem, ...] = ()
    target: torch.Tensor | None = None  # what the data are read straight into
    head: bytes = b""  # what must lie before them, for that to have been right
    memory: list[memoryview] = field(default_factory=list)

    def take_memory(self) -> None:
        """Make the buffers, not sooner than they are needed."""
        if self.target is None:
            self.memory = [memoryview(bytearray(self.length))]
            return
        data = _memory_of(self.target)
        tail = self.length - len(self.head) - len(data)
        self.memory = [memoryview(bytearray(len(self.head))), data, memoryview(bytearray(tail))]


@dataclass(frozen=True)
class _Batch:
    """What one call reads: parts of memory in the order of the file, and the pieces that are whole after it."""

    start: int
    parts: list[memoryview]
    whole: list[_Piece]


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
            pieces, unread = _pieces(entries, size), list[_Piece]()
            for piece in pieces:
                self._aim(piece, planner)
            with closing(_stream(file.fileno(), pieces, pool)) as batches:
                for batch in batches:
                    for part in batch.parts:
                        value = update(part, value)
                    unread += [piece for piece in batch.whole if not self._finish(piece, planner)]
            self._prove(name, size, crc64.text(value))
            for piece in unread:
                data = memoryview(bytearray(piece.length))
                _read(file.fileno(), piece.start, [data])
                for item in piece.items:
                    self._unpickle(item, data, planner)

    def _aim(self, piece: _Piece, planner: LoadPlanner) -> None:
        """Have a piece read straight into its tensor, where that is possible."""
        item = piece.items[0] if len(piece.items) == 1 else None
        form = self._form(item, piece.length) if item is not None else None
        if item is None or form is None or any(item.storage_offsets) or tuple(item.lengths) != form.shape:
            return
        target = planner.resolve_tensor(item).detach()
        if _is_plain(target) and target.dtype == form.dtype:
            piece.target, piece.head = target, form.around.head

    def _finish(self, piece: _Piece, planner: LoadPlanner) -> bool:
        """Bring what has been read where it belongs and free the buffers; return False for what is to be unpickled."""
        memory, piece.memory = piece.memory, []
        if piece.target is not None:
            if memory[0] == piece.head:
                planner.commit_tensor(piece.items[0], piece.target)
                return True
            return False
        views = [self._view(item, memory[0]) for item in piece.items]
        for item, view in zip(piece.items, views, strict=True):
            if view is not None:
                _put(item, view, planner)
        return None not in views

    def _unpickle(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        """Read a proven entry as torch does."""
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            return
        stream: Any = io.BytesIO(data)
        descriptors = self.storage_data[item.storage_index].transform_descriptors
        if descriptors:
            stream = io.BytesIO(self.transforms.transform_load_stream(item, descriptors, stream).read(-1))
        _put(item, torch.load(stream, map_location="cpu", weights_only=True), planner)

    def _view(self, item: ReadItem, data: memoryview) -> torch.Tensor | None:
        form = self._form(item, len(data))
        if form is None or data[: len(form.around.head)] != form.around.head:
            return None  # another torch wrote it
        count, offset = math.prod(form.shape), len(form.around.head)
        return torch.frombuffer(data, dtype=form.dtype, count=count, offset=offset).view(form.shape)

    def _form(self, item: ReadItem, length: int) -> _Form | None:
        """Return how an entry of this length is stored if we stored it; None if we would not, or not so."""
        if item.type == LoadItemType.BYTE_IO:
            return None
        known = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        if not isinstance(known, TensorStorageMetadata) or known.properties.layout != torch.strided:
            return None
        if self.storage_data[item.storage_index].transform_descriptors:
            return None
        offset = item.storage_index.offset
        shape = next((tuple(chunk.sizes) for chunk in known.chunks if offset in {None, chunk.offsets}), None)
        if shape is None or math.prod(shape) == 0:
            return None
        dtype, around = known.properties.dtype, wrapping(known.properties.dtype, shape)
        if length != len(around.head) + math.prod(shape) * dtype.itemsize + len(around.tail):
            return None
        return _Form(dtype, shape, around)

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


def _stream(fd: int, pieces: list[_Piece], pool: ThreadPoolExecutor) -> Generator[_Batch, None, None]:
    """Yield all of a file, batch after batch, each once it has been read, while the next ones are being read."""
    reads: deque[tuple[_Batch, Future[None]]] = deque()
    try:
        for batch in _batches(pieces):
            reads.append((batch, pool.submit(_read, fd, batch.start, batch.parts)))
            if len(reads) > _AHEAD:
                yield _next(reads)
        while reads:
            yield _next(reads)
    finally:
        wait([read for _, read in reads])  # the file is closed next, and its number may become another file's


def _next(reads: deque[tuple[_Batch, Future[None]]]) -> _Batch:
    batch, read = reads.popleft()
    read.result()
    return batch


def _batches(pieces: list[_Piece]) -> Iterator[_Batch]:
    """Yield the reads of a file: small pieces share one, a large one takes several."""
    at, batch, room = 0, _Batch(0, [], []), CHUNK
    for piece in pieces:
        piece.take_memory()
        for memory in piece.memory:
            rest = memory
            while rest:
                part, rest = rest[:room], rest[room:]
                batch.parts.append(part)
                at, room = at + len(part), room - len(part)
                if room == 0 or len(batch.parts) == _PARTS_MAX:
                    yield batch
                    batch, room = _Batch(at, [], []), CHUNK
        batch.whole.append(piece)
    if batch.parts or batch.whole:
        yield batch


def _read(fd: int, start: int, parts: list[memoryview]) -> None:
    """Fill the parts from a place in a file. Raises OSError."""
    left = [part for part in parts if part]
    while left:
        count = os.preadv(fd, left, start)
        if count == 0:
            raise OSError(f"the file ended at {start} bytes")
        start += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _put(item: ReadItem, tensor: torch.Tensor, planner: LoadPlanner) -> None:
    """Copy what is asked for of an entry's tensor."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if length != tensor.size(dim):  # a sparse tensor cannot even be cut to what it is
            tensor = tensor.narrow(dim, offset, length)
    target = planner.resolve_tensor(item)
    with torch.no_grad():  # not `detach`: a sparse tensor would get its values, and the one it came from would not
        target.copy_(tensor)
    planner.commit_tensor(item, target)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are its values in order, in this process's memory."""
    flipped = tensor.is_conj() or tensor.is_neg()
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and not flipped


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a plain tensor's memory, which it must outlive."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
