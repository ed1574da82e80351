"""The one door to S3: boto3 with time-outs, bounded retries, and errors that say what to do.

The endpoint, region and credentials come from AWS's standard environment and files; there is nothing of our own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctool.aws import s3parts
from pctool.aws.pace import Pace
from pctool.aws.s3errors import (
    ConflictError,
    ExistsError,
    NoUploadError,
    S3ClockError,
    S3CorruptError,
    S3CredentialsError,
    S3DownError,
    S3NotThereError,
    S3RefusedError,
    S3SlowError,
    answered,
    is_absent,
    unanswered,
)
from pctool.crc64 import crc64, text
from pctool.errors import UsageError

__all__ = [
    "S3",
    "OpenUpload",
    "S3ClockError",
    "S3CorruptError",
    "S3CredentialsError",
    "S3DownError",
    "S3NotThereError",
    "S3RefusedError",
    "S3SlowError",
    "Stored",
    "parse_url",
]

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0  # for one answer, not for one object: parts are small
ATTEMPTS = 3  # in all, for throttling and for errors of the service (botocore's standard mode)
PART_BYTES = 32 << 20  # with 8 MiB parts S3 throttled large uploads (s3-connector-for-pytorch #219)
PARTS_AT_ONCE = 16  # of all files together: half a GiB of memory; one stream to S3 moves about 100 MB/s
RANGES_AT_ONCE = 4  # of a download: all ranks of a node fetch at once, and 8 x 4 streams are about 3 GB/s
LIST_PAGE = 1000  # S3's limit
CONFLICT_PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # between tries after 409: another request for this key is under way
CHANGED_PAUSES_S = (0.0,)  # an object that arrived with other bytes than S3 keeps a checksum of is fetched once more


@dataclass(frozen=True)
class Stored:
    """What S3 says of an object; the checksum is None where S3 keeps none of the whole object of this kind."""

    size: int
    crc64nvme: str | None
    etag: str = ""


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted. `key` is relative to the prefix."""

    key: str
    id: str
    initiated: float  # seconds since the epoch
    algorithm: str | None  # the checksum it was begun with: S3 takes no part with another


def parse_url(url: str) -> tuple[str, str]:
    """Return (bucket, prefix without slashes at its ends) of s3://bucket/prefix. Raise UsageError otherwise."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UsageError(f"{url!r} is not an S3 address", fix="write it as s3://bucket/prefix")
    return bucket, prefix.strip("/")


class S3:
    """Objects under one prefix of one bucket. Keys are relative to the prefix. Safe to use from several threads.

    Every method raises S3RefusedError, S3ClockError, S3NotThereError, S3SlowError or S3DownError; 409 is retried.
    `pace` bounds the bytes of files that pass, over all threads; `check_part` is called before each part that is sent,
    and what it raises ends the upload. `part_bytes` None: PART_BYTES.
    """

    def __init__(
        self,
        url: str,
        *,
        part_bytes: int | None = None,
        parts_at_once: int = PARTS_AT_ONCE,
        ranges_at_once: int = RANGES_AT_ONCE,
        pace: Pace | None = None,
        check_part: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/")
        self.bucket, self.prefix = parse_url(url)
        self.part_bytes = part_bytes or PART_BYTES
        self.parts_at_once = parts_at_once
        self.pace = pace or Pace()
        self.check_part = check_part
        # both start threads as they are needed
        self._pool = ThreadPoolExecutor(parts_at_once, thread_name_prefix="s3-part")
        self._ranges_pool = ThreadPoolExecutor(ranges_at_once, thread_name_prefix="s3-range")
        self._lock = threading.Lock()
        self._made: Any = None

    def folders(self, under: str) -> list[str]:
        """Return the names of the folders right under `under`, sorted."""
        prefix = self.key(under) + "/"
        pages = self._object_pages(Prefix=prefix, Delimiter="/")
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return sorted(key[len(prefix) :].rstrip("/") for key in found)

    def sizes(self, under: str) -> dict[str, int]:
        """Return the size of every object under `under` by its name relative to it."""
        prefix = self.key(under) + "/"
        objects = (entry for page in self._object_pages(Prefix=prefix) for entry in page.get("Contents", []))
        return {entry["Key"][len(prefix) :]: int(entry["Size"]) for entry in objects}

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, None if it is not there."""
        door = self.door(key)
        answer = door.ask_or_none("get_object", ChecksumMode="ENABLED")
        if answer is None:
            return None
        with door.errors():
            return bytes(answer["Body"].read())

    def stored(self, key: str) -> Stored | None:
        """Return an object's size and checksum, None if it is not there."""
        answer = self.door(key).ask_or_none("head_object", ChecksumMode="ENABLED")
        if answer is None:
            return None
        return Stored(int(answer["ContentLength"]), answer.get("ChecksumCRC64NVME"), str(answer.get("ETag", "")))

    def download(self, key: str, target: Path) -> None:
        """Write an object to `target`, which appears whole or not at all, and durably.

        It comes in ranges, several at a time; one that breaks off is asked for anew, three tries in all. Raises
        S3CorruptError if it brings, twice, other bytes than S3 keeps a checksum of.
        """
        s3parts.persist(lambda: self._download(key, target), CHANGED_PAUSES_S, on=(S3CorruptError,))

    def checksum(self, key: str, kept: Stored) -> str:
        """Read an object, that `stored` told of, and return its CRC64-NVME; nothing is kept of it."""
        return self._ranges(key, kept, lambda data, at: None)

    def put_file(self, key: str, source: Path, size: int, crc64nvme: str, *, upload: str | None = None) -> None:
        """Store a file that is to have this size and checksum; it is read once. Compare with what S3 then says.

        A large one goes in parts, several at a time; `upload` is the id of one that was begun before and is gone on
        with. What fails leaves the upload open, for the next try. Raises IncompleteError if the file is not what it is
        to be, and S3CorruptError if S3 refuses what it received, or keeps something else.
        """
        with source.open("rb", buffering=0) as file:
            sending = s3parts.Upload(
                self.door(key),
                file.fileno(),
                size=size,
                crc64nvme=crc64nvme,
                where=str(source),
                pace=self.pace,
                check=self.check_part,
            )
            self._put(key, sending, size, crc64nvme, upload)
        kept = self.stored(key)
        if kept is None or (kept.size, kept.crc64nvme) != (size, crc64nvme):
            raise S3CorruptError(
                f"S3 keeps {kept}, sent were {size} bytes with CRC64-NVME {crc64nvme}",
                where=f"{self.url}/{key}",
                fix="the file is sent again at the next try; if this stays, S3 (or what stands for it) is at fault",
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object if none of that key is there; return False if one is. 409 is tried again."""
        write = functools.partial(
            self.door(key).ask,
            "put_object",
            Body=data,
            IfNoneMatch="*",
            ChecksumAlgorithm="CRC64NVME",
            ChecksumCRC64NVME=text(crc64(data)),
        )
        try:
            s3parts.persist(write, CONFLICT_PAUSES_S, on=(ConflictError,))
            return True
        except ExistsError:
            return False
        except ConflictError:
            raise self._conflicts(key) from None

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        full = [{"Key": self.key(key)} for key in keys]
        for start in range(0, len(full), 1000):  # S3's limit a request
            batch = full[start : start + 1000]
            answer = self.ask("delete_objects", batch[0]["Key"], Delete={"Objects": batch, "Quiet": True})
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise S3RefusedError(f"{first.get('Code')}: {first.get('Message')}", where=first.get("Key"))

    def uploads(self, under: str) -> list[OpenUpload]:
        """Return the multipart uploads that are open under `under`, the newest first."""
        prefix = self.key(f"{under}/") if under else self.key("")
        cut = len(self.key(""))
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        found = [
            OpenUpload(
                entry["Key"][cut:], entry["UploadId"], entry["Initiated"].timestamp(), entry.get("ChecksumAlgorithm")
            )
            for page in self._pages("list_multipart_uploads", markers, Prefix=prefix)
            for entry in page.get("Uploads", [])
        ]
        return sorted(found, key=lambda upload: upload.initiated, reverse=True)

    def abort(self, upload: OpenUpload) -> None:
        """Drop a multipart upload and its parts; one that is gone already is no error."""
        try:
            self.door(upload.key).ask("abort_multipart_upload", UploadId=upload.id)
        except NoUploadError:
            pass

    def check_uploads(self, key: str) -> None:
        """Begin an upload in parts, look for it, and abort it: raise if any of that is refused."""
        began = self.door(key).ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
        upload = OpenUpload(key, str(began["UploadId"]), 0.0, None)
        try:
            self.uploads("")
            self.door(key).ask("list_parts", UploadId=upload.id)
        finally:
            self.abort(upload)

    def ask(self, operation: str, about: str, **parameters: Any) -> dict[str, Any]:
        """Return S3's answer to one of boto3's operations on the bucket. `about` names the key in errors.

        Credentials that S3 takes no longer are looked for anew, once: who made them may have renewed them.
        """
        client = self._client()
        try:
            return self._answer(client, operation, about, parameters)
        except S3CredentialsError:
            return self._answer(self._client(instead_of=client), operation, about, parameters)

    def door(self, key: str) -> _Door:
        """Return what asks about one object."""
        return _Door(self, key)

    def key(self, key: str) -> str:
        """Return a key with the prefix."""
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextmanager
    def errors(self, about: str) -> Iterator[None]:
        """Turn botocore's errors into ours."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            raise answered(error, self.url, about) from error
        except (BotoCoreError, HTTPError) as error:
            raise unanswered(error, self.url, about) from error

    def _put(self, key: str, sending: s3parts.Upload, size: int, crc64nvme: str, upload: str | None) -> None:
        """Send a file; begin anew where another request is in the way, or the upload in parts is gone."""
        left = iter([upload])  # what was begun before is good for the first try only

        def send() -> None:
            if size <= self.part_bytes:
                return sending.send_whole(self._pool)
            try:
                return sending.send_parts(self._pool, self.part_bytes, next(left, None))
            except NoUploadError:  # completed, by us with the answer lost or by a newer attempt; or aborted
                kept = self.stored(key)
                if kept is None or (kept.size, kept.crc64nvme) != (size, crc64nvme):
                    raise
            return None

        try:
            s3parts.persist(send, CONFLICT_PAUSES_S, on=(ConflictError, NoUploadError))
        except (ConflictError, NoUploadError):
            raise self._conflicts(key) from None

    def _conflicts(self, key: str) -> S3SlowError:
        return S3SlowError(
            f"another request for this key stays under way ({len(CONFLICT_PAUSES_S) + 1} tries)",
            where=f"{self.url}/{key}",
            fix="it is tried again later",
        )

    def _download(self, key: str, target: Path) -> None:
        kept = self.stored(key)
        if kept is None:
            raise S3NotThereError("the object is not there", where=f"{self.url}/{key}")
        part = target.with_name(f"{target.name}.part")
        try:
            with part.open("wb", buffering=0) as file:
                found = self._ranges(key, kept, s3parts.write_at(file.fileno()))
                if kept.crc64nvme not in {None, found}:
                    raise S3CorruptError(
                        f"what came has CRC64-NVME {found}, S3 keeps {kept.crc64nvme}", where=f"{self.url}/{key}"
                    )
                os.fsync(file.fileno())
            part.rename(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _ranges(self, key: str, kept: Stored, write: Callable[[bytes, int], None]) -> str:
        coming = s3parts.Download(
            self.door(key), size=kept.size, etag=kept.etag, where=f"{self.url}/{key}", pace=self.pace
        )
        return text(coming.run(self._ranges_pool, self.part_bytes, write))

    def _object_pages(self, **query: Any) -> Iterator[dict[str, Any]]:
        return self._pages(
            "list_objects_v2", {"ContinuationToken": "NextContinuationToken"}, MaxKeys=LIST_PAGE, **query
        )

    def _pages(self, operation: str, markers: Mapping[str, str], **query: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self.ask(operation, query["Prefix"], **query)
            yield page
            if not page.get("IsTruncated"):
                return
            query |= {asked: page[told] for asked, told in markers.items()}

    def _answer(self, client: Any, operation: str, about: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        with self.errors(about):
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **parameters)
            return answer

    def _client(self, *, instead_of: Any = None) -> Any:
        with self._lock:
            if self._made is None or self._made is instead_of:
                self._made = _make_client(self.parts_at_once)
            return self._made


class _Door:
    """One object, as `s3parts.Door` has it."""

    def __init__(self, s3: S3, key: str) -> None:
        self._s3 = s3
        self._key = key

    def ask(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return self._s3.ask(operation, self._key, Key=self._s3.key(self._key), **parameters)

    def ask_or_none(self, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """Return S3's answer, None if the object is not there."""
        try:
            return self.ask(operation, **parameters)
        except S3NotThereError as error:
            if error.__cause__ is not None and is_absent(error.__cause__):
                return None
            raise

    def errors(self) -> AbstractContextManager[None]:
        return self._s3.errors(self._key)


def _make_client(connections: int = 10) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UsageError(
            "boto3 is not installed, so S3 cannot be used",
            fix="install pctool with its s3 extra: pip install 'pctool[s3]'",
        ) from None
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=2 * connections,  # parts, and beside them whoever lists or asks for heads
        response_checksum_validation="when_required",  # of a range S3 says none; we compare the whole's ourselves
    )
    # a session of its own: boto3's default session is not safe to share between threads
    return boto3.session.Session().client("s3", config=config)
