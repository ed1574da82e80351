"""S3 for tests: moto's server, and in front of it a stand-in that checks sums as S3 does and fails on request.

moto keeps a checksum it is given but accepts a wrong one, so whatever relies on S3's check needs the stand-in.
"""

from __future__ import annotations

import base64
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pctool.checkpoint.manifest import crc64nvme

START_S = 60.0
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
_SUM = "x-amz-checksum-"
_MISMATCH = "Checksum Type mismatch occurred, expected checksum Type: crc64nvme, actual checksum Type: {}"
# fault -> (status, S3's error code)
ANSWERS = {
    "refused": (403, "AccessDenied"),
    "throttled": (503, "SlowDown"),
    "broken": (500, "InternalError"),
    "conflict": (409, "ConditionalRequestConflict"),
}


@dataclass
class Fault:
    """Fail requests of `method` whose path holds `part`, `times` times."""

    kind: str  # one of ANSWERS, or: lost-answer, flip, hang, cut (the connection is reset in the body)
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
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state.seen.append((self.command, self.path))
        fault = state.fault(self.command, self.path)
        if fault == "hang":
            state.released.wait(30)
            self.close_connection = True
        elif fault in ANSWERS:
            self._error(*ANSWERS[fault])
        elif (named := self._part_sum_named()) not in {"", "crc64nvme"}:
            self._error(400, "InvalidRequest", _MISMATCH.format(named))
        elif not self._sum_is_right(body):
            self._error(400, "BadDigest")
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

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

    def _forward(self, body: bytes, fault: str) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)  # type: ignore[attr-defined]
        headers = {key: value for key, value in self.headers.items() if key.lower() not in {"connection"}}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault == "lost-answer":
            self.close_connection = True
            return
        if fault == "flip" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in {"transfer-encoding", "connection", "date", "server", "content-length"}:
                self.send_header(key, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "cut":
            self.close_connection = True
            data = data[: len(data) // 2]
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str, message: str = "injected") -> None:
        data = _ERROR.format(code=code, message=message).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def wrong_sum() -> str:
    """Return a checksum that fits no file of the tests."""
    return base64.b64encode(b"\0" * 8).decode()
