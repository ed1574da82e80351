"""Messages between ranks, writers and the coordinator: a JSON object a line, followed by raw bytes where it says so.

Over a Unix socket file descriptors may go with a message; over TCP they may not.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LINE_MAX = 64 << 20  # bytes; the entries of 8,192 files are 1 MB
_BLOB_MAX = 1 << 40
_FDS_MAX = 4
_CHUNK = 1 << 16


class BrokenFrameError(Exception):
    """The other side sent what is no message."""


@dataclass(frozen=True)
class Frame:
    """One message: its fields, the raw bytes and the file descriptors that came with it."""

    fields: dict[str, Any]
    blobs: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        """Return what the message is about."""
        return str(self.fields.get("op", ""))


def send(
    sock: socket.socket, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = (), fds: Sequence[int] = ()
) -> None:
    """Send one message whole. Raise OSError if the other side has gone."""
    line = json.dumps({**fields, "blobs": [len(blob) for blob in blobs]}, separators=(",", ":")).encode() + b"\n"
    sent = socket.send_fds(sock, [line], list(fds)) if fds else 0
    sock.sendall(memoryview(line)[sent:])
    for blob in blobs:
        sock.sendall(blob)


class Receiver:
    """The messages of one socket, in order, of at most `most` bytes each. Use from one thread."""

    def __init__(self, sock: socket.socket, *, most: int = _BLOB_MAX) -> None:
        self._sock = sock
        self.most = most
        self._searched = 0  # so many bytes hold no end of a line
        self._unix = sock.family == socket.AF_UNIX
        self._buffer = bytearray()
        self._fds: list[int] = []

    def next(self) -> Frame | None:
        """Wait for the next message and return it, None once the other side has gone.

        Raises BrokenFrameError for what is no message, TimeoutError where the socket has a time-out.
        """
        while True:
            frame = self.take()
            if frame is not None:
                return frame
            if not self.fill():
                return None

    def fill(self) -> bool:
        """Read what is there, waiting for the first byte; return False once the other side has gone."""
        try:
            data = self._read()
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def take(self) -> Frame | None:
        """Return the next message if it has come whole, without waiting."""
        end = self._buffer.find(b"\n", self._searched)
        self._searched = len(self._buffer) if end < 0 else end
        if self._searched > min(LINE_MAX, self.most):
            raise BrokenFrameError(f"a line of over {min(LINE_MAX, self.most)} bytes")
        if end < 0:
            return None
        fields, lengths = _parse(bytes(self._buffer[:end]))
        if end + 1 + sum(lengths) > self.most:
            raise BrokenFrameError(f"a message of over {self.most} bytes")
        if len(self._buffer) < end + 1 + sum(lengths):
            return None
        self._searched = 0
        blobs, at = [], end + 1
        for length in lengths:
            blobs.append(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]
        fds, self._fds = tuple(self._fds), []
        return Frame(fields, tuple(blobs), fds)

    def _read(self) -> bytes:
        if not self._unix:
            return self._sock.recv(_CHUNK)
        data, ancillary, _, _ = self._sock.recvmsg(_CHUNK, socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize))
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(body[: len(body) - len(body) % found.itemsize])
                self._fds += found
        for fd in self._fds:
            os.set_inheritable(fd, False)
        return data


def _parse(line: bytes) -> tuple[dict[str, Any], list[int]]:
    try:
        fields = json.loads(line)
        lengths = [int(length) for length in fields.pop("blobs")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BrokenFrameError(f"not a message: {line[:80]!r}") from error
    if any(length < 0 for length in lengths) or sum(lengths) > _BLOB_MAX:
        raise BrokenFrameError(f"blobs of {lengths} bytes")
    return fields, lengths
