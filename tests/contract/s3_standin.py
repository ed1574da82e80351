"""S3 for tests: moto's server, and in front of it a stand-in that checks sums as S3 does and fails on request.

moto keeps a checksum it is given but accepts a wrong one, so whatever relies on S3's check needs the stand-in. So does
whatever asks for open uploads and their parts: `s3_multipart` keeps the books of those.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from s3_multipart import Ask, Books, parse

from pctool.checkpoint.manifest import crc64nvme

START_S = 60.0
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
_SUM = "x-amz-checksum-"
_MISMATCH = "Checksum Type mismatch occurred, expected checksum Type: crc64nvme, actual checksum Type: {}"
# fault -> (status, S3's error code)
ANSWERS = {
    "refused": (403, "AccessDenied"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "gone": (404, "NoSuchUpload"),
    "throttled": (503, "SlowDown"),
    "broken": (500, "InternalError"),
    "conflict": (409, "ConditionalRequestConflict"),
}


@dataclass
class Fault:
    """Fail requests of `method` whose path holds `part`, `times` times."""

    # one of ANSWERS, or: hang; lost-answer and failed-after (500), both once S3 has done it.
    # Of what is sent to S3: reset (the connection, in the body), lose (S3 takes it and keeps all but the end), spoil (a
    # bit flips on the way). Of what S3 sends: cut (the connection, in the body), curtail (too few bytes, in good
    # order), flip.
    kind: str
    method: str = ""
    part: str = ""
    times: int = 10**6


@dataclass
class StandIn:
    """The stand-in's address, and what it is to do wrong."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    books: Books = field(default_factory=Books)
    expired: set[str] = field(default_factory=set)  # access key ids that are good no longer
    parts_now: int = 0  # parts of uploads that are being taken at this moment, and the most that ever were
    parts_most: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, method: str, part: str) -> int:
        """Return how many requests of `method` there were whose path holds `part`."""
        return sum(seen == method and part in path for seen, path in self.seen)

    @contextmanager
    def counted(self, is_part: bool) -> Iterator[None]:
        """Count a part as long as this lasts."""
        with self.counting:
            self.parts_now += is_part
            self.parts_most = max(self.parts_most, self.parts_now)
        try:
            yield
        finally:
            with self.counting:
                self.parts_now -= is_part

    def fault(self, method: str, path: str) -> str:
        """Return the kind of fault for a request, "" for none."""
        for fault in self.faults:
            if fault.times > 0 and fault.method in {"", method} and fault.part in path:
                fault.times -= 1
                return fault.kind
        return ""


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's server as a process bound to loopback; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    small_parts = {"S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(16 << 20)}
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **small_parts}
    )
    try:
        _await_port(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)  # moto says nothing when it is ready
    raise RuntimeError("moto's server did not start")


@contextmanager
def stand_in(upstream: str) -> Iterator[StandIn]:
    """Run the stand-in in front of `upstream`, on a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    state = StandIn(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.state = state  # type: ignore[attr-defined]
    server.upstream = upstream.removeprefix("http://")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_any(self) -> None:
        state: StandIn = self.server.state  # type: ignore[attr-defined]
        with state.counted(parse(self.command, self.path).kind == "part"):
            self._handle(state)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

    def _handle(self, state: StandIn) -> None:
        fault = state.fault(self.command, self.path)
        if fault == "reset":
            state.seen.append((self.command, self.path))
            return self._reset()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state.seen.append((self.command, self.path))
        if fault == "spoil" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "hang":
            state.released.wait(30)
            self.close_connection = True
        elif fault in ANSWERS:
            self._error(*ANSWERS[fault])
        elif self._access_key() in state.expired:
            self._error(400, "ExpiredToken")
        elif (named := self._part_sum_named()) not in {"", "crc64nvme"}:
            self._error(400, "InvalidRequest", _MISMATCH.format(named))
        elif not self._sum_is_right(body):
            self._error(400, "BadDigest")
        else:
            self._answer(parse(self.command, self.path), body, fault)
        return None

    def _answer(self, ask: Ask, body: bytes, fault: str) -> None:
        state: StandIn = self.server.state  # type: ignore[attr-defined]
        headers = {key.lower(): value for key, value in self.headers.items()}
        refusal = state.books.refuse(ask, headers, body)
        if refusal is not None:
            return self._error(*refusal)
        listed = state.books.listed(ask)
        if listed is not None:
            return self._send(200, [("Content-Type", "application/xml")], listed)
        return self._forward(ask, headers, body, fault)

    def _reset(self) -> None:
        """Read half of the body, then reset the connection."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _access_key(self) -> str:
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        return found[1] if found else ""

    def _part_sum_named(self) -> str:
        """Return the checksum that a part names, "null" for none, "" where the request is no part.

        All our uploads in parts are begun with CRC64NVME, and S3 takes no part that names another one.
        """
        if self.command != "PUT" or "partNumber=" not in self.path:
            return ""
        named = {key.lower().removeprefix(_SUM) for key in self.headers if key.lower().startswith(_SUM)}
        named |= {self.headers.get("x-amz-trailer", "").removeprefix(_SUM)} - {""}
        named |= {self.headers.get("x-amz-sdk-checksum-algorithm", "").lower()} - {""}
        return "+".join(sorted(named)) or "null"

    def _sum_is_right(self, body: bytes) -> bool:
        claimed = self.headers.get("x-amz-checksum-crc64nvme")
        if claimed is None or self.command != "PUT" or "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return True
        return claimed == crc64nvme([body])

    def _forward(self, ask: Ask, told: Mapping[str, str], body: bytes, fault: str) -> None:
        state: StandIn = self.server.state  # type: ignore[attr-defined]
        sent = body[:-1] if fault == "lose" else body
        headers = {key: value for key, value in self.headers.items() if key.lower() not in {"connection"}}
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)  # type: ignore[attr-defined]
        connection.request(self.command, self.path, sent, {**headers, "Content-Length": str(len(sent))})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status < 300:
            state.books.note(ask, told, body, data, answer.getheader("ETag") or "")
        if fault == "lost-answer":
            self.close_connection = True
            return
        if fault == "failed-after":
            self._error(500, "InternalError")
            return
        if fault == "flip" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "curtail":
            data = data[:-1]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self._send(answer.status, answer.getheaders(), data, length=length, cut=fault == "cut")

    def _send(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        *,
        length: str | None = None,
        cut: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in headers:
            if key.lower() not in {"transfer-encoding", "connection", "date", "server", "content-length"}:
                self.send_header(key, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if cut:
            self.close_connection = True
            data = data[: len(data) // 2]
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str, message: str = "injected") -> None:
        self._send(status, [], _ERROR.format(code=code, message=message).encode())


def wrong_sum() -> str:
    """Return a checksum that fits no file of the tests."""
    return base64.b64encode(b"\0" * 8).decode()
