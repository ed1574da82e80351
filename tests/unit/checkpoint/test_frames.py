"""Messages come out as they went in, however the bytes arrive."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from pctool.checkpoint.frames import BrokenFrameError, Receiver, send


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(10)
        yield left, right


def test_fields_blobs_and_descriptors_go_together(
    pair: tuple[socket.socket, socket.socket], tmp_path_factory: pytest.TempPathFactory
) -> None:
    left, right = pair
    path = tmp_path_factory.mktemp("fd") / "file"
    path.write_bytes(b"shared")
    fd = os.open(path, os.O_RDONLY)
    blob = os.urandom(3 << 20)  # more than a socket holds
    sender = threading.Thread(target=send, args=(left, {"op": "a"}, [blob, b""], [fd]))
    sender.start()
    receiver = Receiver(right)
    frame = receiver.next()
    sender.join()
    os.close(fd)
    assert frame is not None
    assert (frame.op, frame.blobs) == ("a", (blob, b""))
    with os.fdopen(frame.fds[0], "rb") as file:
        assert file.read() == b"shared"


def test_messages_that_arrive_byte_by_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    copy, other = socket.socketpair()
    with copy, other:
        send(copy, {"op": "x", "text": "ä\n"}, [b"12\n3"])
        send(copy, {"op": "y"})
        raw = other.recv(4096)
    receiver = Receiver(right)
    seen = []
    for byte in raw:
        left.sendall(bytes([byte]))
        receiver.fill()
        while (frame := receiver.take()) is not None:
            seen.append((frame.op, frame.blobs))
    assert seen == [("x", (b"12\n3",)), ("y", ())]


def test_the_end_is_none_also_in_the_middle_of_a_message(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.sendall(b'{"op": "half')
    left.close()
    assert Receiver(right).next() is None


@pytest.mark.parametrize("line", [b"hello\n", b"[]\n", b'{"op": 1}\n', b'{"blobs": [-1]}\n', b'{"blobs": "x"}\n'])
def test_what_is_no_message_is_refused(pair: tuple[socket.socket, socket.socket], line: bytes) -> None:
    left, right = pair
    left.sendall(line)
    with pytest.raises(BrokenFrameError):
        Receiver(right).next()
