"""Files to and from S3 in parts: several at a time, each read or written once, their checksums combined."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pctool.aws.pace import Pace
from pctool.aws.s3errors import (
    RETRIED,
    ExistsError,
    S3CorruptError,
    S3DownError,
)
from pctool.crc64 import combine, crc64, text
from pctool.errors import IncompleteError

UPLOAD_PAUSES_S = (1.0, 5.0)  # between the tries of one part, over and above botocore's own retries
DOWNLOAD_PAUSES_S = (5.0, 30.0)  # between the tries of one range: botocore retries an answer, not its body
MAX_PARTS = 10_000  # S3's limit
_CHUNK = 1 << 20

T = TypeVar("T")


class Door(Protocol):
    """What parts need of S3, for one object."""

    def ask(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Return S3's answer to an operation on the object. Raise as `S3` does."""

    def errors(self) -> AbstractContextManager[None]:
        """Turn what goes wrong while a body is read into our errors."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a file, in bytes. Parts count from 1."""

    number: int
    start: int
    length: int


@dataclass(frozen=True)
class SentPart:
    """A part that S3 has of an upload; the checksum is None where S3 says none."""

    size: int
    crc64nvme: str | None
    etag: str


def pieces(size: int, length: int) -> list[Piece]:
    """Return the pieces of a file of `size` bytes, each of `length`, or longer where S3 would not take so many."""
    length = max(length, -(-size // MAX_PARTS))
    starts = range(0, size, length)
    return [Piece(number, start, min(length, size - start)) for number, start in enumerate(starts, start=1)]


def whole(parts: Iterable[tuple[Piece, int]]) -> int:
    """Return the CRC of a file from those of its pieces, in order."""
    value = 0
    for piece, of_piece in parts:
        value = combine(value, of_piece, piece.length)
    return value


def together(pool: Executor, calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return what all calls return, in order. After the first failure none is begun; raise it once all have ended."""
    futures = [pool.submit(call) for call in calls]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    failed = (future.exception() for future in futures if not future.cancelled())
    first = next((error for error in failed if error is not None), None)
    if first is not None:
        raise first
    return [future.result() for future in futures]


def persist(call: Callable[[], T], pauses: Iterable[float], on: tuple[type[Exception], ...] = RETRIED) -> T:
    """Return what `call` returns, tried anew after each pause where it raises one of `on`.

    The pauses vary by half, so that many who were refused at once do not come back at once.
    """
    for pause in pauses:
        try:
            return call()
        except on:
            time.sleep(pause * random.uniform(0.5, 1.5))
    return call()


class Upload:
    """One file on its way to S3. A part is in memory only while a thread of the pool has it."""

    def __init__(
        self,
        door: Door,
        fd: int,
        *,
        size: int,
        crc64nvme: str,
        where: str,
        pace: Pace,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._door = door
        self._fd = fd
        self._size = size
        self._crc64nvme = crc64nvme
        self._where = where
        self._pace = pace
        self._check_on = check

    def send_whole(self, pool: Executor) -> None:
        """Send the file as one. Raise IncompleteError if it is not what it should be."""
        pool.submit(persist, self._send_whole, UPLOAD_PAUSES_S).result()

    def _send_whole(self) -> None:
        self._check_size()
        data = self._read(Piece(1, 0, self._size))
        self._check(crc64(data))
        self._pace.take(self._size)
        self._door.ask("put_object", Body=data, ChecksumAlgorithm="CRC64NVME", ChecksumCRC64NVME=self._crc64nvme)

    def send_parts(self, pool: Executor, length: int, upload: str | None) -> None:
        """Send the file in parts, going on with an upload that was begun before.

        A part that is there is believed only if its size and its CRC, taken of the source now, are as S3 says. The
        whole is completed only if the source is what it should be. Raises IncompleteError if it is not; the upload
        stays open then, as after any other failure.
        """
        self._check_size()
        there = self._listed(upload) if upload else {}
        if upload is None:
            began = self._door.ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
            upload = str(began["UploadId"])
        cut = pieces(self._size, length)
        sent = together(pool, [self._sender(piece, upload, there.get(piece.number)) for piece in cut])
        self._check(whole((piece, value) for piece, (value, _) in zip(cut, sent, strict=True)))
        self._door.ask(
            "complete_multipart_upload",
            UploadId=upload,
            MultipartUpload={
                "Parts": [
                    {"PartNumber": piece.number, "ETag": etag} for piece, (_, etag) in zip(cut, sent, strict=True)
                ]
            },
            ChecksumCRC64NVME=self._crc64nvme,
            ChecksumType="FULL_OBJECT",
            MpuObjectSize=self._size,
        )

    def _sender(self, piece: Piece, upload: str, there: SentPart | None) -> Callable[[], tuple[int, str]]:
        """Return what sends one part and returns its CRC and ETag; at each try it is read anew."""
        return lambda: persist(lambda: self._send(piece, upload, there), UPLOAD_PAUSES_S)

    def _send(self, piece: Piece, upload: str, there: SentPart | None) -> tuple[int, str]:
        self._check_on()
        data = self._read(piece)
        value = crc64(data)
        if there is not None and (there.size, there.crc64nvme) == (piece.length, text(value)):
            return value, there.etag
        self._pace.take(piece.length)
        answer = self._door.ask(
            "upload_part",
            UploadId=upload,
            PartNumber=piece.number,
            Body=data,
            ChecksumAlgorithm="CRC64NVME",
            ChecksumCRC64NVME=text(value),
        )
        return value, str(answer["ETag"])

    def _read(self, piece: Piece) -> bytes:
        read: list[bytes] = []
        left = piece.length
        while left and (data := os.pread(self._fd, left, piece.start + piece.length - left)):
            read.append(data)
            left -= len(data)
        if left:
            end = piece.start + piece.length - left
            raise IncompleteError(f"{end} bytes where the manifest says {self._size}", where=self._where)
        return read[0] if len(read) == 1 else b"".join(read)

    def _check_size(self) -> None:
        found = os.fstat(self._fd).st_size
        if found != self._size:
            raise IncompleteError(f"{found} bytes where the manifest says {self._size}", where=self._where)

    def _check(self, value: int) -> None:
        if text(value) != self._crc64nvme:
            raise IncompleteError(
                f"CRC64-NVME {text(value)} where the manifest says {self._crc64nvme}", where=self._where
            )

    def _listed(self, upload: str) -> dict[int, SentPart]:
        return {
            int(part["PartNumber"]): SentPart(int(part["Size"]), part.get("ChecksumCRC64NVME"), str(part["ETag"]))
            for page in self._part_pages(upload)
            for part in page.get("Parts", [])
        }

    def _part_pages(self, upload: str) -> Iterator[dict[str, Any]]:
        marker = 0
        while True:
            page = self._door.ask("list_parts", UploadId=upload, PartNumberMarker=marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = int(page["NextPartNumberMarker"])


class Download:
    """One object on its way from S3, in ranges, each asked for anew where it breaks off."""

    def __init__(self, door: Door, *, size: int, etag: str, where: str, pace: Pace) -> None:
        self._door = door
        self._size = size
        self._etag = etag
        self._where = where
        self._pace = pace

    def run(self, pool: Executor, length: int, write: Callable[[bytes, int], None]) -> int:
        """Give every byte to `write`, with its place, from several threads; return the CRC of the whole.

        Raises S3CorruptError where the object was replaced meanwhile, S3NotThereError where it is gone.
        """
        cut = pieces(self._size, length)
        read = together(pool, [self._reader(piece, write) for piece in cut])
        return whole(zip(cut, read, strict=True))

    def _reader(self, piece: Piece, write: Callable[[bytes, int], None]) -> Callable[[], int]:
        return lambda: persist(lambda: self._read(piece, write), DOWNLOAD_PAUSES_S)

    def _read(self, piece: Piece, write: Callable[[bytes, int], None]) -> int:
        value, at, end = 0, piece.start, piece.start + piece.length
        self._pace.take(piece.length)
        with self._door.errors():
            for chunk in self._body(piece):
                write(chunk, at)
                value = crc64(chunk, value)
                at += len(chunk)
        if at != end:
            raise S3DownError(
                f"the answer held {at - piece.start} bytes where {piece.length} were asked for", where=self._where
            )
        return value

    def _body(self, piece: Piece) -> Iterator[bytes]:
        span = f"bytes={piece.start}-{piece.start + piece.length - 1}"
        try:
            answer = self._door.ask("get_object", Range=span, IfMatch=self._etag)
        except ExistsError:
            raise S3CorruptError("the object was replaced while it was read", where=self._where) from None
        sent = answer.get("ContentRange")
        if sent != f"{span.replace('=', ' ')}/{self._size}":
            raise S3CorruptError(f"asked for {span}, S3 sent {sent}", where=self._where)
        yield from answer["Body"].iter_chunks(_CHUNK)


def write_at(fd: int) -> Callable[[bytes, int], None]:
    """Return what writes bytes at a place of an open file, all of them."""

    def write(data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, at)
            view, at = view[done:], at + done

    return write
