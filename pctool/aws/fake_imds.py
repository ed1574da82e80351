"""A fake EC2 instance metadata service (IMDSv2) for many nodes, on loopback; standard library only.

One object and one thread serve any number of nodes, each on a port of its own, as each instance has its own service.
The product reaches it as it reaches the real one, through AWS_EC2_METADATA_SERVICE_ENDPOINT. Paths, headers, codes and
formats: EC2 User Guide, "Use IMDSv2" and "Spot Instance interruption notices".
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

Fault = Literal["500", "hang", "refuse-token"]

TOKEN_PATH = "/latest/api/token"
TTL_HEADER = "x-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "x-aws-ec2-metadata-token"
MAX_TTL_S = 21600  # six hours, IMDS's own bound
_META = "/latest/meta-data/"
_MAX_REQUEST = 16384  # bytes; a request of ours has about 200
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Not Allowed"}


@dataclass
class _Node:
    values: dict[str, str]  # path below meta-data -> text
    listener: socket.socket
    tokens: dict[str, float] = field(default_factory=dict)  # token -> monotonic end of life
    fault: Fault | None = None
    requests: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"


@dataclass
class _Connection:
    node: _Node
    received: bytearray = field(default_factory=bytearray)


class FakeImds:
    """Serve instance metadata for many nodes until `close`. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="fake-imds", daemon=True)
        self._thread.start()

    def add(self, name: str, *, instance_id: str, instance_type: str, availability_zone: str) -> str:
        """Start serving a node and return its endpoint, `http://127.0.0.1:PORT`. Raise ValueError if it is there."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        values = {
            "instance-id": instance_id,
            "instance-type": instance_type,
            "placement/availability-zone": availability_zone,
            "placement/region": availability_zone.rstrip("abcdefghijklmnopqrstuvwxyz"),
            "local-ipv4": "127.0.0.1",
        }
        with self._lock:
            if name in self._nodes:
                listener.close()
                raise ValueError(f"node {name!r} is already served")
            node = self._nodes[name] = _Node(values=values, listener=listener)
        self._in_thread(lambda: self._register(node))
        return node.endpoint

    def endpoint(self, name: str) -> str:
        """Return a node's endpoint. Raise KeyError if it is not served (never added, or removed)."""
        with self._lock:
            return self._nodes[name].endpoint

    def notice(self, name: str, *, action: str = "terminate", when: datetime) -> None:
        """Schedule a spot interruption: `spot/instance-action` answers with it from now on. `when` is aware."""
        self._set(name, "spot/instance-action", json.dumps({"action": action, "time": _stamp(when)}))

    def rebalance(self, name: str) -> None:
        """Recommend a rebalance from now on."""
        text = json.dumps({"noticeTime": _stamp(datetime.now(timezone.utc))})
        self._set(name, "events/recommendations/rebalance", text)

    def clear(self, name: str) -> None:
        """Take back notice and recommendation: both answer 404 again."""
        with self._lock:
            for path in ("spot/instance-action", "events/recommendations/rebalance"):
                self._nodes[name].values.pop(path, None)

    def fault(self, name: str, mode: Fault | None) -> None:
        """Make a node's service answer 500, hang without an answer, or refuse tokens (403); None heals it."""
        with self._lock:
            self._nodes[name].fault = mode

    def expire_tokens(self, name: str) -> None:
        """Make every token handed out so far stale."""
        with self._lock:
            self._nodes[name].tokens.clear()

    def requests(self, name: str) -> int:
        """Return how many requests a node's service has got, answered or not."""
        with self._lock:
            return self._nodes[name].requests

    def remove(self, name: str) -> None:
        """Stop serving a node, as if it had died: on return its port refuses connections and open ones are reset."""
        with self._lock:
            node = self._nodes.pop(name)
        self._in_thread(lambda: self._drop(node))

    def close(self) -> None:
        """Stop serving all nodes and end the thread."""
        for name in list(self._nodes):
            self.remove(name)
        self._running = False
        self._wake.send(b"\0")
        self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _set(self, name: str, path: str, text: str) -> None:
        with self._lock:
            self._nodes[name].values[path] = text

    def _in_thread(self, action: Callable[[], None]) -> None:
        """Run `action` in the serving thread and wait until it has run."""
        done = threading.Event()
        self._todo.extend((action, done.set))
        self._wake.send(b"\0")
        done.wait()

    def _serve(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(key.data, _Node):
                    self._accept(key.data)
                elif key.fd in self._selector.get_map():  # an earlier event of this round may have closed it
                    self._read(key)
            while self._todo:
                self._todo.popleft()()

    def _register(self, node: _Node) -> None:
        self._selector.register(node.listener, selectors.EVENT_READ, node)

    def _drop(self, node: _Node) -> None:
        for key in list(self._selector.get_map().values()):
            owner = key.data.node if isinstance(key.data, _Connection) else key.data
            if owner is node:
                self._close(key.fileobj)

    def _close(self, sock: object) -> None:
        assert isinstance(sock, socket.socket)
        self._selector.unregister(sock)
        sock.close()

    def _accept(self, node: _Node) -> None:
        try:
            connection, _ = node.listener.accept()
        except OSError:  # the client has gone again
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Connection(node))

    def _read(self, key: selectors.SelectorKey) -> None:
        connection, state = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        state.received += data
        if not data or len(state.received) > _MAX_REQUEST:
            self._close(connection)
            return
        while b"\r\n\r\n" in state.received:
            head, _, rest = bytes(state.received).partition(b"\r\n\r\n")
            state.received[:] = rest
            answer = self._answer(state.node, head.decode("latin-1"))
            if answer is None:  # hanging: the request is read and never answered
                continue
            try:
                connection.sendall(answer)  # a few hundred bytes: they fit into an empty send buffer
            except OSError:
                self._close(connection)
                return

    def _answer(self, node: _Node, head: str) -> bytes | None:
        request, *lines = head.split("\r\n")
        method, path, *_ = [*request.split(" "), "", ""]
        headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
        with self._lock:
            node.requests += 1
            if node.fault == "hang":
                return None
            code, body = (500, "") if node.fault == "500" else _respond(node, method, path, headers)
        reason = _REASONS.get(code, "Internal Server Error")
        fields = f"Content-Type: text/plain\r\nContent-Length: {len(body.encode())}\r\nServer: EC2ws"
        return f"HTTP/1.1 {code} {reason}\r\n{fields}\r\n\r\n{body}".encode()


def _respond(node: _Node, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
    if path == TOKEN_PATH:
        return _token(node, method, headers)
    if method != "GET":
        return 405, ""
    if time.monotonic() >= node.tokens.get(headers.get(TOKEN_HEADER, ""), 0.0):
        return 401, ""
    text = node.values.get(path[len(_META) :]) if path.startswith(_META) else None
    return (404, "") if text is None else (200, text)


def _token(node: _Node, method: str, headers: Mapping[str, str]) -> tuple[int, str]:
    if method != "PUT":
        return 405, ""
    if node.fault == "refuse-token" or "x-forwarded-for" in headers:
        return 403, ""
    ttl = headers.get(TTL_HEADER, "")
    if not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_S:
        return 400, ""
    token = secrets.token_urlsafe(40)
    node.tokens[token] = time.monotonic() + int(ttl)
    return 200, token


def _stamp(when: datetime) -> str:
    """Write a time as IMDS does: 2017-09-18T08:22:00Z."""
    return when.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
