"""How launches talk: JSON lines over TCP, opened by a handshake in which both sides prove that they know the nonce.

The handshake: the hub sends a challenge; the peer answers with its node number, a challenge of its own and an HMAC
over both; the hub answers with an HMAC over the peer's challenge. The nonce itself never crosses the network, and a
peer that finds a foreign service on a port learns so before it believes a word of it.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

BEAT_S = 2.0  # each side says something at least this often
SILENCE_S = 20.0  # a side silent for so long is lost: ten beats, since a false loss costs the gang a restart of minutes
HANDSHAKE_S = 5.0
PORTS = 16  # a hub that cannot bind moves on by one, at most so far; peers look there too
MAX_HANDSHAKE = 1024  # bytes in a line before the nonce is proved
MAX_LINE = 65536
MAX_UNSENT = 1 << 20  # bytes; whoever reads so little is lost

BEAT: Message = {"type": "beat"}


class WireError(Exception):
    """The other side does not keep to the protocol."""


class Lines:
    """Cut a stream into JSON objects, one a line."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes, *, limit: int = MAX_LINE) -> Iterator[Message]:
        """Yield the messages that `data` completes. Raise WireError for a longer line or for what is no object."""
        self._received += data
        while (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            if len(line) > limit:
                raise WireError(f"a line of more than {limit} bytes")
            yield decode(line)
        if len(self._received) > limit:
            raise WireError(f"a line of more than {limit} bytes")


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return a line as a message. Raise WireError for what is no JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("not an object")
    return message


def challenge() -> str:
    """Return a fresh challenge."""
    return os.urandom(16).hex()


def proof(nonce: str, role: str, *parts: object) -> str:
    """Return the HMAC by which `role` ('hub' or 'peer') proves that it knows the nonce."""
    text = json.dumps([role, *map(str, parts)])
    return hmac.new(nonce.encode(), text.encode(), "sha256").hexdigest()


def proved(message: Message, expected: str) -> bool:
    """Return whether the message carries the expected proof; in constant time."""
    given = message.get("proof")
    # compare_digest takes no other text, and JSON can spell what cannot be encoded: half a surrogate pair
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


def tune(connection: socket.socket) -> None:
    """Send at once what is written: our messages are short, and one is worth a node."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def split_address(text: str) -> tuple[str, int]:
    """Split host:port. Raise ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not host:port")
    return host.strip("[]"), int(port)
