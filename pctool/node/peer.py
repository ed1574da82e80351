"""A peer of the launches' channel: finds the hub, proves itself, and stays in touch."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pctool.node import wire
from pctool.node.wire import Message

_ATTEMPT_S = 2.0  # connect and handshake with one port
_PAUSE_S = (0.1, 1.0)  # between rounds over the ports, growing


@dataclass(frozen=True)
class HubJoined:
    """The hub is found and knows the nonce."""

    address: str


@dataclass(frozen=True)
class HubSaid:
    """The hub sent a message."""

    message: Message


@dataclass(frozen=True)
class HubGone:
    """The hub was not found in time, its connection has ended, or it has been silent for too long."""

    why: str


PeerEvent = HubJoined | HubSaid | HubGone


class Peer:
    """Keep the connection to the hub, in a thread. Events go to `deliver`, called in it; methods are thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        nonce: str,
        node: int,
        deliver: Callable[[PeerEvent], None],
        join_s: float,
        beat_s: float = wire.BEAT_S,
        silence_s: float = wire.SILENCE_S,
    ) -> None:
        self._host = host
        self._port = port
        self._nonce = nonce
        self._node = node
        self._deliver = deliver
        self._join_s = join_s
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._outbox: deque[bytes] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._close_by: float | None = None
        self._closing = threading.Event()
        self._lines = wire.Lines()
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)

    def start(self) -> None:
        """Begin to look for the hub."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send to the hub, as soon as it is found."""
        self._outbox.append(wire.encode(message))
        self._kick()

    def close(self, *, flush_s: float = 2.0) -> None:
        """Send what is still unsent, for at most `flush_s` seconds, and end. Nothing is delivered any more."""
        self._close_by = time.monotonic() + flush_s
        self._closing.set()
        self._kick()
        self._thread.join(flush_s + 2 * _ATTEMPT_S)

    def _kick(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # many kicks are waiting already, or the thread has ended

    def _run(self) -> None:
        try:
            with self._find() as sock:
                self._tell(HubJoined("{}:{}".format(*sock.getpeername()[:2])))
                self._talk(sock)
        except (OSError, wire.WireError) as error:
            self._tell(HubGone(str(error)))
        finally:
            self._wake.close()
            self._woken.close()

    def _tell(self, event: PeerEvent) -> None:
        if self._close_by is None:
            self._deliver(event)

    def _find(self) -> socket.socket:
        """Try the ports in turn until the hub is there. Raise OSError with the last reason when the time is over."""
        deadline = time.monotonic() + self._join_s
        pause, last = _PAUSE_S[0], "not tried"
        while not self._closing.is_set() and time.monotonic() < deadline:
            for port in range(self._port, min(self._port + wire.PORTS, 65536)):
                try:
                    return self._handshake(port)
                except Exception as error:  # noqa: BLE001 (a foreign service may answer anything; the search goes on)
                    last = f"port {port}: {error}" if port == self._port else last
            self._closing.wait(pause)
            pause = min(pause * 2, _PAUSE_S[1])
        raise OSError(f"no hub at {self._host}:{self._port} within {self._join_s:g} s ({last})")

    def _handshake(self, port: int) -> socket.socket:
        deadline = time.monotonic() + _ATTEMPT_S
        sock = socket.create_connection((self._host, port), timeout=_ATTEMPT_S)
        try:
            wire.tune(sock)
            hello = self._next(sock, deadline)
            mine = wire.challenge()
            told = wire.proof(self._nonce, "peer", hello.get("challenge"), self._node, mine)
            sock.sendall(wire.encode({"node": self._node, "challenge": mine, "proof": told}))
            if not wire.proved(self._next(sock, deadline), wire.proof(self._nonce, "hub", mine)):
                raise wire.WireError("not our hub: it does not know the nonce")
        except BaseException:
            sock.close()
            raise
        return sock

    def _next(self, sock: socket.socket, deadline: float) -> Message:
        """Read one message of the handshake, byte by byte, so that nothing of the next one is taken with it."""
        line = bytearray()
        while not line.endswith(b"\n"):
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            byte = sock.recv(1)
            if not byte or len(line) > wire.MAX_HANDSHAKE:
                raise wire.WireError("not our hub: no handshake")
            line += byte
        return wire.decode(bytes(line))

    def _talk(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        last_heard = last_sent = time.monotonic()
        unsent = bytearray()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while True:
            poll.register(sock, select.POLLIN | (select.POLLOUT if unsent else 0))
            ready = dict(poll.poll(self._beat_s / 4 * 1000))
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if ready.get(sock.fileno(), 0) & ~select.POLLOUT:
                self._receive(sock)
                last_heard = time.monotonic()
            now = time.monotonic()
            if not self._outbox and now - last_sent >= self._beat_s:
                self._outbox.append(wire.encode(wire.BEAT))
            while self._outbox:
                unsent += self._outbox.popleft()
                last_sent = now
            _send(sock, unsent)
            if now - last_heard > self._silence_s:
                raise OSError(f"silent for {self._silence_s:g} s")
            if self._close_by is not None and (not unsent or now >= self._close_by):
                return

    def _receive(self, sock: socket.socket) -> None:
        data = sock.recv(65536)
        if not data:
            raise OSError("connection closed")
        for message in self._lines.feed(data):
            if message.get("type") != "beat":
                self._tell(HubSaid(message))


def _send(sock: socket.socket, unsent: bytearray) -> None:
    """Send what goes now and take it off `unsent`."""
    if not unsent:
        return
    try:
        sent = sock.send(unsent)
    except BlockingIOError:
        return
    del unsent[:sent]
