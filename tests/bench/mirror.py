"""Measure mirroring beside a bare upload of the same bytes to the same place.

    python tests/bench/mirror.py [--files 8] [--mib 96] [--rounds 3] [--scratch DIR]

The place is a server on loopback, a process of its own, that reads and forgets. The bare upload is boto3's
`upload_file` with parts of the same length and as many at once; it compares nothing with a manifest. Both are run in
turn, and the best of each is compared; on a busy machine the CPU seconds tell more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pctool.aws.s3 import PART_BYTES, PARTS_AT_ONCE, S3
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.deliver import FILES_AT_ONCE
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore
from pctool.run.layout import RunDir, checkpoint_name

Took = tuple[float, float]  # seconds by the wall, seconds of CPU
NAME = checkpoint_name(0, 1)
LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
BEGUN = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
DONE = b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kept: dict[str, tuple[str, str]] = {}  # noqa: RUF012 (path -> size, checksum)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def handle_any(self) -> None:
        left = int(self.headers.get("Content-Length") or 0)
        buffer = memoryview(bytearray(1 << 20))
        while left:
            left -= self.rfile.readinto(buffer[: min(left, 1 << 20)])
        path, _, query = self.path.partition("?")
        checksum = self.headers.get("x-amz-checksum-crc64nvme") or ""
        if self.command == "HEAD":
            size, checksum = self.kept.get(path, ("0", ""))
            return self._send(200 if path in self.kept else 404, b"", size, checksum)
        if self.command == "PUT" and not query:
            self.kept[path] = (self.headers["Content-Length"], checksum)
        if self.command == "POST" and "uploadId" in query:
            self.kept[path] = (self.headers.get("x-amz-mp-object-size") or "0", checksum)
        answers = {"GET": LIST, "POST": DONE if "uploadId" in query else BEGUN}
        missing = self.command == "GET" and not re.search("list-type|uploads", query)
        return self._send(404 if missing else 200, b"" if missing else answers.get(self.command, b""))

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

    def _send(self, status: int, data: bytes, size: str = "", checksum: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", size or str(len(data)))
        self.send_header("ETag", '"e"')
        if checksum:
            self.send_header("x-amz-checksum-crc64nvme", checksum)
        self.end_headers()
        self.wfile.write(data)


def _bare(files: list[Path]) -> Took:
    from boto3.s3.transfer import TransferConfig

    client = S3("s3://bucket")._client()
    config = TransferConfig(PART_BYTES, max_concurrency=PARTS_AT_ONCE, multipart_chunksize=PART_BYTES)
    began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(lambda file: client.upload_file(str(file), "bucket", f"bare/{file.name}", Config=config), files))
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _mirrored(run: RunDir, number: int) -> Took:
    store = S3Store(f"s3://bucket/{number}", "run")
    store.s3._client()
    began = time.perf_counter(), time.process_time()
    assert Mirror(run, store, 0, uploads=store).poke()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _save(run: RunDir, files: int, mib: int) -> list[Path]:
    run.attempt(0).path.mkdir(parents=True)
    folder = run.checkpoints / NAME
    folder.mkdir(parents=True)
    paths = [folder / f"__{rank}_0.distcp" for rank in range(files)]
    for path in paths:
        path.write_bytes(os.urandom(1 << 20) * mib)
    entries = {path.name: mf.describe_file(path) for path in paths}
    manifest = mf.Manifest(run=str(run.path), attempt=0, step=1, parent=None, world_size=1, files=entries)
    PosixStore(run.checkpoints).publish(NAME, mf.encode(manifest))
    return paths


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None)
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        run = RunDir(Path(scratch) / "run")
        files = _save(run, args.files, args.mib)
        rounds = [(_bare(files), _mirrored(run, number)) for number in range(args.rounds)]
    total = args.files * args.mib
    for what, at in (("wall", 0), ("cpu", 1)):
        bare, mirrored = (min(took[at] for took in times) for times in zip(*rounds, strict=True))
        print(f"{total} MiB, {what}: bare {bare:.2f} s, mirrored {mirrored:.2f} s, {mirrored / bare:.2f}x")
        print("  rounds:", "; ".join(f"{one[at]:.2f} {two[at]:.2f}" for one, two in rounds))


if __name__ == "__main__":
    main()
