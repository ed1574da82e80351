"""The hub of the launches' channel, on node 0: one thread, any number of peers."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pctool.errors import UsageError
from pctool.node import wire
from pctool.node.trouble import NodeTroubleError
from pctool.node.wire import Message

_SPARE_STRANGERS = 64  # connections without proof, besides one a node; beyond that the oldest goes


@dataclass(frozen=True)
class Joined:
    """A peer is there and knows the nonce."""

    node: int


@dataclass(frozen=True)
class Said:
    """A peer sent a message."""

    node: int
    message: Message


@dataclass(frozen=True)
class Gone:
    """A peer's connection has ended, or it has been silent for too long."""

    node: int
    why: str


HubEvent = Joined | Said | Gone


def listen(host: str, port: int) -> socket.socket:
    """Bind to host:port or to one of the ports after it.

    Raise UsageError if the host is not ours, NodeTroubleError if no port is free or the host has no address now.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + wire.PORTS, 65536)):
        try:
            return socket.create_server((host, candidate), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                kind = UsageError if error.errno == errno.EADDRNOTAVAIL else NodeTroubleError
                raise kind(
                    f"cannot listen on {host}: {error.strerror}",
                    where="PCTOOL_HUB",
                    fix="check that the NodeAddr of this node in Slurm is an address of this node",
                ) from None
    raise NodeTroubleError(
        f"ports {port} to {port + wire.PORTS - 1} of {host} are all taken",
        where="PCTOOL_HUB",
        fix="requeue the job: the next attempt chooses another port",
    )


@dataclass(eq=False)
class _Link:
    sock: socket.socket
    challenge: str
    last_heard: float
    last_sent: float
    node: int | None = None  # None until the nonce is proved
    lines: wire.Lines = field(default_factory=wire.Lines)
    unsent: bytearray = field(default_factory=bytearray)


class Hub:
    """Serve the peers until `close`. Events go to `deliver`, called in the hub's thread; methods are thread-safe."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        nonce: str,
        nodes: int,
        deliver: Callable[[HubEvent], None],
        beat_s: float = wire.BEAT_S,
        silence_s: float = wire.SILENCE_S,
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._nonce = nonce
        self._nodes = nodes
        self._deliver = deliver
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._links: dict[int, _Link] = {}
        self._strangers: dict[_Link, None] = {}  # oldest first
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._close_by: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def broadcast(self, message: Message) -> None:
        """Send to every peer that is there."""
        self._send(None, message)

    def send(self, node: int, message: Message) -> None:
        """Send to one peer; a peer that is not there gets nothing, and its `Gone` has been or will be delivered."""
        self._send(node, message)

    def close(self, *, flush_s: float = 2.0) -> None:
        """Send what is still unsent, for at most `flush_s` seconds, and end."""
        self._close_by = time.monotonic() + flush_s
        self._kick()
        self._thread.join()

    def _send(self, node: int | None, message: Message) -> None:
        self._outbox.append((node, wire.encode(message)))
        self._kick()

    def _kick(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # many kicks are waiting already, or the thread has ended

    def _serve(self) -> None:
        while not self._finished():
            for key, mask in self._selector.select(self._pause()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.data.sock.fileno() >= 0:  # an earlier event of this round may have closed it
                    self._serve_link(key.data, mask)
            self._send_outbox()
            self._keep_time()
        for link in [*self._links.values(), *self._strangers]:
            self._shut(link)
        self._selector.close()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def _finished(self) -> bool:
        if self._close_by is None:
            return False
        waiting = self._outbox or any(link.unsent for link in self._links.values())
        return not waiting or time.monotonic() >= self._close_by

    def _pause(self) -> float:
        return 0.05 if self._close_by is not None else self._beat_s / 4

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none left, or it has gone again
                return
            if len(self._strangers) >= self._nodes + _SPARE_STRANGERS:
                self._shut(next(iter(self._strangers)))
            sock.setblocking(False)
            wire.tune(sock)
            now = time.monotonic()
            link = _Link(sock, wire.challenge(), now, now)
            self._strangers[link] = None
            self._selector.register(sock, selectors.EVENT_READ, link)
            self._queue(link, wire.encode({"pctool": 1, "challenge": link.challenge}))

    def _serve_link(self, link: _Link, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(link)
            if mask & selectors.EVENT_READ and link.sock.fileno() >= 0:
                self._read(link)
        except Exception as error:  # noqa: BLE001 (anybody can connect: what one sends must not end the gang's channel)
            self._lose(link, f"broken: {error!r}")

    def _read(self, link: _Link) -> None:
        try:
            data = link.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(link, f"connection lost: {error.strerror}")
            return
        if not data:
            self._lose(link, "connection closed")
            return
        link.last_heard = time.monotonic()
        try:
            for message in link.lines.feed(data, limit=wire.MAX_LINE if link.node is not None else wire.MAX_HANDSHAKE):
                self._take(link, message)
        except wire.WireError as error:
            self._lose(link, str(error))

    def _take(self, link: _Link, message: Message) -> None:
        if link.node is None:
            self._admit(link, message)
        elif message.get("type") != "beat":
            self._deliver(Said(link.node, message))

    def _admit(self, link: _Link, message: Message) -> None:
        node, answer = message.get("node"), message.get("challenge")
        if type(node) is not int or not 0 < node < self._nodes:  # True is an int to isinstance
            raise wire.WireError("no node of this gang")
        if not wire.proved(message, wire.proof(self._nonce, "peer", link.challenge, node, answer)):
            raise wire.WireError("a stranger: it does not know the nonce")
        earlier = self._links.pop(node, None)
        if earlier is not None:  # the peer gave up on that one before it heard our answer
            self._shut(earlier)
        self._strangers.pop(link, None)
        link.node = node
        self._links[node] = link
        self._queue(link, wire.encode({"proof": wire.proof(self._nonce, "hub", answer)}))
        self._deliver(Joined(node))

    def _send_outbox(self) -> None:
        while self._outbox:
            node, data = self._outbox.popleft()
            links = list(self._links.values()) if node is None else [self._links[node]] if node in self._links else []
            for link in links:
                self._queue(link, data)

    def _queue(self, link: _Link, data: bytes) -> None:
        link.last_sent = time.monotonic()
        idle = not link.unsent
        link.unsent += data
        if idle:
            self._flush(link)
        elif len(link.unsent) > wire.MAX_UNSENT:
            self._lose(link, "reads nothing")

    def _flush(self, link: _Link) -> None:
        try:
            sent = link.sock.send(link.unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(link, f"connection lost: {error.strerror}")
            return
        del link.unsent[:sent]
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        self._selector.modify(link.sock, mask, link)

    def _keep_time(self) -> None:
        """Beat, and drop the silent. Runs after the reads of a round: whoever spoke while we were held up is heard."""
        now = time.monotonic()
        for link in list(self._links.values()):
            if now - link.last_heard > self._silence_s:
                self._lose(link, f"silent for {self._silence_s:g} s")
            elif now - link.last_sent >= self._beat_s:
                self._queue(link, wire.encode(wire.BEAT))
        for link in list(self._strangers):
            if now - link.last_sent > wire.HANDSHAKE_S:
                self._shut(link)

    def _lose(self, link: _Link, why: str) -> None:
        self._shut(link)
        if link.node is not None and self._links.get(link.node) is link:
            del self._links[link.node]
            self._deliver(Gone(link.node, why))

    def _shut(self, link: _Link) -> None:
        self._strangers.pop(link, None)
        if link.sock.fileno() >= 0:
            self._selector.unregister(link.sock)
            link.sock.close()
