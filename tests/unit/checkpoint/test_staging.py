"""The host memory of the copies; and in which order a device is asked to copy, on a device that only notes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pctool.checkpoint import staging as staging_module
from pctool.checkpoint.staging import Staging


class Device:
    """Streams and tensors that note what they are asked for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.within = "compute"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.within = self.within, stream.name
        yield
        self.within = before


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.events = device, name, 0

    def wait_stream(self, other: Stream) -> None:
        self.device.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.device.notes.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        return Event(self.device, f"{self.name}.{self.events}")


class Event:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def synchronize(self) -> None:
        self.device.notes.append(f"the host waits for {self.name}")


class Memory:
    """A tensor, or its place in the host memory."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def copy_(self, source: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        self.device.notes.append(f"{self.device.within} copies {source.name}")

    def record_stream(self, stream: Stream) -> None:
        self.device.notes.append(f"{self.name} is kept for {stream.name}")


def test_what_a_forward_pass_changes_is_copied_first_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    compute, side = Stream(device, "compute"), Stream(device, "side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(staging_module, "_side_stream", lambda: side)
    pairs: Any = [(Memory(device, f"place of {name}"), Memory(device, name)) for name in ("buffer", "weight")]
    copied = staging_module._copy_from_device(pairs[:1], pairs[1:])
    assert copied.on_device
    copied.before_update()
    copied.wait()
    assert device.notes == [
        "side waits for compute",
        "side copies buffer",
        "compute waits for side.1",
        "side copies weight",
        "weight is kept for side",
        "compute waits for side.2",
        "the host waits for side.2",
    ]


def test_the_memory_is_used_again_until_it_is_too_small() -> None:
    staging = Staging()
    assert staging.fit(1000)
    first, room = os.fstat(staging.fd).st_ino, staging.capacity
    assert not staging.fit(room)
    assert os.fstat(staging.fd).st_ino == first
    assert staging.fit(room + 1)
    assert os.fstat(staging.fd).st_ino != first
    fd = staging.fd
    staging.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_nothing_to_save_needs_no_memory_but_may_be_asked_for() -> None:
    staging = Staging()
    assert staging.fit(0)
    staging.append(0, [])
    assert staging.size == 0
    assert not staging.copy([], late=[]).on_device
    staging.close()
