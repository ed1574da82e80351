"""The host memory that a rank's state is copied into, shared with its writer and used again for each save.

A memfd, so that it has no name and ends with the processes that hold it. Where CUDA is there it is pinned, and the
copies run on a stream of their own beside the next step's computation.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pctool.checkpoint.image import Image, wrapping
from pctool.checkpoint.writing import aligned


class Staging:
    """One rank's host buffer. `fd` is shared with the writer; `size` bytes of it are in use."""

    def __init__(self) -> None:
        self.fd = -1
        self.generation = 0  # tells one memory from the next, whose descriptor may have the same number
        self.capacity = 0
        self.size = 0
        self._map: mmap.mmap | None = None
        self._all: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._pinned = False
        self.image: Image | None = None  # what it is prepared for

    def fit(self, size: int) -> bool:
        """Make room for `size` bytes; return whether the memory is another one now, so that it must be shared anew."""
        if size <= self.capacity and self.fd >= 0:
            return False
        self.close()
        # room for what is serialised anew each time to grow, and whole huge pages for the kernel to use if it will
        try:
            self._make(aligned(size + max(size >> 6, 1 << 20)))
        except BaseException:
            self.close()  # the next save tries anew
            raise
        return True

    def _make(self, capacity: int) -> None:
        self.fd = os.memfd_create("pctool-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._all = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = _pin(self._all)
        self.capacity = capacity
        self.generation += 1

    def prepare(self, image: Image, tensors: Sequence[torch.Tensor]) -> None:
        """Write what does not change from save to save, and remember where the tensors go."""
        assert self._map is not None  # `fit` comes first
        assert self._all is not None
        self._views, self.image = [], image
        for slot, tensor in zip(image.slots, tensors, strict=True):
            around = wrapping(tensor.dtype, tuple(tensor.shape))
            self._map[slot.start : slot.data] = around.head
            end = slot.data + slot.bytes
            self._map[end : end + len(around.tail)] = around.tail
            self._views.append(self._all[slot.data : end].view(tensor.dtype).view(tensor.shape))

    def append(self, start: int, blobs: Iterable[bytes]) -> None:
        """Write what was serialised behind the tensors, and set the size."""
        assert self._map is not None
        for blob in blobs:
            self._map[start : start + len(blob)] = blob
            start += len(blob)
        self.size = start

    def copy(self, tensors: Sequence[torch.Tensor], *, late: Sequence[bool]) -> Copied:
        """Copy the tensors in. On CPU they are there on return; on a device see `Copied`.

        `late` tensors are those that nothing changes before the optimizer's next step.
        """
        pairs = list(zip(self._views, tensors, strict=True))
        if not any(tensor.is_cuda for tensor in tensors):
            with torch.no_grad():
                for view, tensor in pairs:
                    view.copy_(tensor)
            return Copied()
        early = [pair for pair, is_late in zip(pairs, late, strict=True) if not is_late]
        return _copy_from_device(early, [pair for pair, is_late in zip(pairs, late, strict=True) if is_late])

    def close(self) -> None:
        """Let the memory go; a writer that holds it keeps it."""
        if self._pinned and self._all is not None:
            _cudart().cudaHostUnregister(self._all.data_ptr())
        self._views, self._all, self._map, self._pinned = [], None, None, False
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.capacity, self.image = -1, 0, None


class Copied:
    """The copies of one save. On a device they go on while the host does; they have begun in any case.

    The stream that computes waits for them by itself: for what a forward pass may change (buffers) at once, for the
    rest in `before_update`, which is to be called before the optimizer touches the weights.
    """

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @property
    def on_device(self) -> bool:
        """Return whether the copies may still be under way."""
        return self._event is not None

    def before_update(self) -> None:
        """Have the current stream wait for the copies; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Wait on the host until all is copied."""
        if self._event is not None:
            self._event.synchronize()


def _copy_from_device(
    early: Sequence[tuple[torch.Tensor, torch.Tensor]], late: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Copied:
    """Copy on a stream of its own, what changes soonest first."""
    current, stream = torch.cuda.current_stream(), _side_stream()
    stream.wait_stream(current)
    with torch.no_grad(), torch.cuda.stream(stream):
        for view, tensor in early:
            view.copy_(tensor, non_blocking=True)
        current.wait_event(stream.record_event())
        for view, tensor in late:
            view.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # one that is freed meanwhile must not be given to others
        return Copied(stream.record_event())


_STREAMS: dict[int, Any] = {}


def _side_stream() -> Any:
    device = torch.cuda.current_device()
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory for the device, where there is one. What cannot be pinned is copied more slowly."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    code = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        warnings.warn(f"host memory for checkpoints could not be pinned (CUDA error {int(code)})", stacklevel=2)
    return int(code) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
