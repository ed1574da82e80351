"""A loopback S3 as fast as Python makes one: buckets named `drop-...` forget what they are sent, others keep it.

It checks no signature and computes no checksum: it believes what it is told, and gives it back. It is there where moto,
which moves 40 MiB/s, would be what is measured; what is right on S3 is not shown by it.
"""

from __future__ import annotations

import http.server
import itertools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_ALWAYS_KEPT = 1 << 20  # bytes: manifests are read back from any bucket
_PIECE = 4 << 20
_SUM = "x-amz-checksum-"
_CRC = f"{_SUM}crc64nvme"


@dataclass
class Kept:
    """One object, or one part of an upload."""

    size: int
    bodies: list[bytearray]
    sums: dict[str, str]


class Sink(http.server.ThreadingHTTPServer):
    """The server. Objects by path; uploads by id."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        self.objects: dict[str, Kept] = {}
        self.uploads: dict[str, tuple[str, dict[int, Kept]]] = {}
        self.numbers = itertools.count(1)
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Sink

    def parse_request(self) -> bool:
        found = super().parse_request()
        if found:
            parts = urlsplit(self.path)
            self.key = unquote(parts.path)
            self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return found

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        found = self._take(keep=not self.key.startswith("/drop-"))
        if "uploadId" in self.query:
            self.server.uploads[self.query["uploadId"]][1][int(self.query["partNumber"])] = found
        elif self.headers.get("If-None-Match") == "*" and self.key in self.server.objects:
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.server.objects[self.key] = found
        return self._answer(headers={"ETag": '"e"', **found.sums})

    def do_POST(self) -> None:
        body = bytes(self._take(keep=True).bodies[0])
        if "uploads" in self.query:
            upload = str(next(self.server.numbers))
            self.server.uploads[upload] = (self.key, {})
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        elif "delete" in self.query:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.server.objects.pop(f"{self.key.rstrip('/')}/{key}", None)
            self._xml("DeleteResult", "")
        else:
            self._complete(self.query["uploadId"])

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "list-type" in self.query:
            self._list()
        elif "uploads" in self.query:
            self._xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
        elif "uploadId" in self.query:
            parts = sorted(self.server.uploads[self.query["uploadId"]][1].items())
            listed = (
                f"<PartNumber>{number}</PartNumber><Size>{part.size}</Size>{_told(part)}" for number, part in parts
            )
            self._xml("ListPartsResult", "".join(f"<Part>{part}<ETag>e</ETag></Part>" for part in listed))
        elif self.key in self.server.objects:
            self._give(self.server.objects[self.key])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_DELETE(self) -> None:
        self.server.uploads.pop(self.query.get("uploadId", ""), None)
        self.server.objects.pop(self.key, None)
        self._answer(204)

    def _complete(self, upload: str) -> None:
        key, parts = self.server.uploads.pop(upload)
        bodies = [body for _, part in sorted(parts.items()) for body in part.bodies]
        found = Kept(sum(part.size for part in parts.values()), bodies, self._sums())
        self.server.objects[key] = found
        self._xml("CompleteMultipartUploadResult", f"<ETag>e</ETag>{_told(found)}")

    def _give(self, found: Kept) -> None:
        begin, end, status = 0, found.size, 200
        headers = {"ETag": '"e"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            begin, end, status = int(wanted[1]), min(int(wanted[2] or found.size - 1) + 1, found.size), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        elif self.headers.get("x-amz-checksum-mode"):
            headers |= found.sums
        self._answer(status, headers=headers, length=end - begin)
        at = 0
        for body in found.bodies if self.command == "GET" else ():
            self.connection.sendall(memoryview(body)[max(begin - at, 0) : max(end - at, 0)])
            at += len(body)

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        start = f"{self.key.rstrip('/')}/"
        sizes = {
            key[len(start) :]: kept.size for key, kept in list(self.server.objects.items()) if key.startswith(start)
        }
        folders, listed = set(), ""
        for key in sorted(key for key in sizes if key.startswith(prefix)):
            folder, inside, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if inside:
                folders.add(f"{prefix}{folder}{inside}")
            else:
                listed += f"<Contents><Key>{key}</Key><Size>{sizes[key]}</Size></Contents>"
        common = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders))
        self._xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{listed}{common}")

    def _take(self, *, keep: bool) -> Kept:
        """Read the request's body to its end, and keep it or not."""
        size = int(self.headers.get("Content-Length", 0))
        keep = keep or size <= _ALWAYS_KEPT
        got = self.rfile.read1(min(size, _ALWAYS_KEPT)) if size else b""  # all that is buffered, if anything is
        body, at = bytearray(size if keep else _PIECE), len(got)
        body[:at] = got
        view = memoryview(body)
        while at < size:
            # MSG_TRUNC on TCP: the kernel throws the bytes away, so that the sink takes little of the clients' cores
            target, flags = (view[at:], 0) if keep else (view[: size - at], socket.MSG_TRUNC)
            count = self.connection.recv_into(target, 0, flags)
            if count == 0:
                raise ConnectionError("the client has gone")
            at += count
        return Kept(size, [body] if keep else [], self._sums())

    def _sums(self) -> dict[str, str]:
        found = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(_SUM)}
        return {**({_CRC: found[_CRC]} if _CRC in found else {}), f"{_SUM}type": "FULL_OBJECT"}

    def _xml(self, name: str, inside: str) -> None:
        self._answer(body=f"<{name}>{inside}</{name}>".encode())

    def _answer(
        self, status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _told(kept: Kept) -> str:
    return f"<ChecksumCRC64NVME>{kept.sums[_CRC]}</ChecksumCRC64NVME>" if _CRC in kept.sums else ""


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Run a sink in a process of its own; give the environment in which AWS's libraries find it."""
    config = folder / "aws-config"
    # over https botocore signs no body; without this it would hash each byte here, which on S3 it does not
    config.write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        yield {
            "AWS_ENDPOINT_URL_S3": process.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(config),
        }
        process.stdin.close()


def main() -> None:
    """Serve until standard input ends; print the address."""
    sink: Any = Sink()
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{sink.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
