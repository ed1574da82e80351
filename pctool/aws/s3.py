"""The one door to S3: boto3 with time-outs, bounded retries, and errors that say what to do.

The endpoint, region and credentials come from AWS's standard environment and files; there is nothing of our own.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctool.errors import AwsError, UsageError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0  # for one answer, not for one object: parts are small
ATTEMPTS = 3  # in all, for throttling and for errors of the service (botocore's standard mode)
PART_BYTES = 32 << 20  # with 8 MiB parts S3 throttled large uploads (s3-connector-for-pytorch #219)
MAX_PARTS = 10_000  # S3's limit
DOWNLOAD_PAUSES_S = (5.0, 30.0)  # between the tries of one download: botocore retries an answer, not its body
CONFLICT_ATTEMPTS = 5  # 409: another request for this key is under way

_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "AllAccessDisabled"}
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_SLOW = {"SlowDown", "503", "RequestTimeout", "Throttling", "ServiceUnavailable", "RequestTimeTooSkewed"}
_CONFLICT = {"409", "ConditionalRequestConflict", "OperationAborted"}
_EXISTS = {"412", "PreconditionFailed"}
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidPart"}


class S3RefusedError(AwsError):
    """S3 does not let this identity do that."""


class S3NotThereError(AwsError):
    """The bucket, or an object that should be in it, is not there."""


class S3SlowError(AwsError):
    """S3 throttles, or did not answer in time."""


class S3DownError(AwsError):
    """S3 cannot be reached, or fails."""


class S3CorruptError(AwsError):
    """What S3 received or keeps is not what was sent."""


@dataclass(frozen=True)
class Stored:
    """What S3 says of an object; the checksum is None where S3 keeps none."""

    size: int
    crc64nvme: str | None


class _ConflictError(Exception):
    """409 on a conditional write."""


class _ExistsError(Exception):
    """412 on a conditional write."""


def parse_url(url: str) -> tuple[str, str]:
    """Return (bucket, prefix without slashes at its ends) of s3://bucket/prefix. Raise UsageError otherwise."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise UsageError(f"{url!r} is not an S3 address", fix="write it as s3://bucket/prefix")
    return bucket, prefix.strip("/")


class S3:
    """Objects under one prefix of one bucket. Keys are relative to the prefix. Safe to use from several threads.

    Every method raises S3RefusedError, S3NotThereError, S3SlowError or S3DownError; 409 is retried.
    """

    def __init__(self, url: str, *, part_bytes: int = PART_BYTES) -> None:
        self.url = url.rstrip("/")
        self.bucket, self.prefix = parse_url(url)
        self.part_bytes = part_bytes

    def folders(self, under: str) -> list[str]:
        """Return the names of the folders right under `under`, sorted."""
        prefix = self._key(under) + "/"
        pages = self._pages(Prefix=prefix, Delimiter="/")
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return sorted(key[len(prefix) :].rstrip("/") for key in found)

    def sizes(self, under: str) -> dict[str, int]:
        """Return the size of every object under `under` by its name relative to it."""
        prefix = self._key(under) + "/"
        objects = (entry for page in self._pages(Prefix=prefix) for entry in page.get("Contents", []))
        return {entry["Key"][len(prefix) :]: int(entry["Size"]) for entry in objects}

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, None if it is not there."""
        with self._errors(key):
            answer = self._absent_is_none(lambda: self._client.get_object(Bucket=self.bucket, Key=self._key(key)))
            return None if answer is None else bytes(answer["Body"].read())

    def stored(self, key: str) -> Stored | None:
        """Return an object's size and checksum, None if it is not there."""
        with self._errors(key):
            answer = self._absent_is_none(
                lambda: self._client.head_object(Bucket=self.bucket, Key=self._key(key), ChecksumMode="ENABLED")
            )
        if answer is None:
            return None
        return Stored(int(answer["ContentLength"]), answer.get("ChecksumCRC64NVME"))

    def download(self, key: str, target: Path) -> None:
        """Write an object to `target`, which appears whole or not at all, and durably.

        One that breaks off, or brings other bytes than S3 keeps a checksum of, is begun anew: three tries in all.
        """
        for pause in DOWNLOAD_PAUSES_S:
            try:
                return self._download(key, target)
            except (S3SlowError, S3DownError, S3CorruptError):
                time.sleep(pause)
        return self._download(key, target)

    def put_file(self, key: str, source: Path, crc64nvme: str) -> None:
        """Store a file, its full-object checksum sent along and compared with what S3 then says.

        Raises S3CorruptError if S3 refuses the checksum or keeps another one or another size.
        """
        size = source.stat().st_size
        self._retry_conflicts(key, lambda: self._put_body(key, source, size, crc64nvme))
        kept = self.stored(key)
        if kept is None or kept.size != size or kept.crc64nvme not in {None, crc64nvme}:
            raise S3CorruptError(
                f"S3 keeps {kept}, sent were {size} bytes with CRC64-NVME {crc64nvme}",
                where=f"{self.url}/{key}",
                fix="the file is sent again at the next try; if this stays, check the file system it is read from",
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object if none of that key is there; return False if one is."""
        where = {"Bucket": self.bucket, "Key": self._key(key)}
        try:
            self._retry_conflicts(key, lambda: self._client.put_object(**where, Body=data, IfNoneMatch="*"))
        except _ExistsError:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        full = [{"Key": self._key(key)} for key in keys]
        for start in range(0, len(full), 1000):  # S3's limit a request
            batch = full[start : start + 1000]
            with self._errors(batch[0]["Key"]):
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise S3RefusedError(f"{first.get('Code')}: {first.get('Message')}", where=first.get("Key"))

    def _download(self, key: str, target: Path) -> None:
        part = target.with_name(f"{target.name}.part")
        try:
            with self._errors(key), part.open("wb") as file:
                answer = self._client.get_object(Bucket=self.bucket, Key=self._key(key))
                for chunk in answer["Body"].iter_chunks(1 << 20):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            part.rename(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _retry_conflicts(self, key: str, write: Callable[[], Any]) -> None:
        for _ in range(CONFLICT_ATTEMPTS):
            try:
                with self._errors(key):
                    write()
                return
            except _ConflictError:
                continue
        raise S3SlowError(
            f"another request for this key stays under way ({CONFLICT_ATTEMPTS} tries)",
            where=f"{self.url}/{key}",
            fix="it is tried again later",
        )

    def _put_body(self, key: str, source: Path, size: int, crc64nvme: str) -> None:
        if size > self.part_bytes:
            self._put_parts(key, source, size, crc64nvme)
            return
        with source.open("rb") as body:
            self._client.put_object(Bucket=self.bucket, Key=self._key(key), Body=body, ChecksumCRC64NVME=crc64nvme)

    def _put_parts(self, key: str, source: Path, size: int, crc64nvme: str) -> None:
        where = {"Bucket": self.bucket, "Key": self._key(key)}
        started = self._client.create_multipart_upload(
            **where, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )
        where["UploadId"] = started["UploadId"]
        try:
            parts = [
                {"PartNumber": number, "ETag": self._put_part(where, number, body)}
                for number, body in enumerate(self._parts(source, size), start=1)
            ]
            self._client.complete_multipart_upload(
                **where,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=crc64nvme,
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=size,
            )
        except BaseException:
            self._abort(where)
            raise

    def _put_part(self, where: dict[str, str], number: int, body: bytes) -> str:
        # botocore would add a CRC32 by itself, and S3 takes no part whose sum is not the one the upload was begun with
        answer = self._client.upload_part(**where, PartNumber=number, Body=body, ChecksumAlgorithm="CRC64NVME")
        return str(answer["ETag"])

    def _parts(self, source: Path, size: int) -> Iterator[bytes]:
        length = max(self.part_bytes, -(-size // MAX_PARTS))
        with source.open("rb") as file:
            while part := file.read(length):
                yield part

    def _abort(self, where: dict[str, str]) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.abort_multipart_upload(**where)
        except (BotoCoreError, ClientError):
            pass  # the first error is the one to tell; the bucket's lifecycle rule clears what is left

    def _pages(self, **query: str) -> Iterator[dict[str, Any]]:
        with self._errors(query["Prefix"]):
            yield from self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, **query)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _absent_is_none(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        try:
            return call()
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise

    @functools.cached_property
    def _client(self) -> Any:
        return _make_client()

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn botocore's errors into ours."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            raise self._typed(error, key) from error
        except (BotoCoreError, HTTPError) as error:
            raise self._unreachable(error, key) from error

    def _typed(self, error: Any, key: str) -> Exception:
        code, where = _code(error), f"{self.url} ({key})"
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _EXISTS:
            return _ExistsError(key)
        if code in _CONFLICT:
            return _ConflictError(key)
        if code in _CORRUPT:
            return S3CorruptError(f"S3 refused what it received: {error}", where=where, fix="it is sent again")
        if code == "NoSuchBucket":
            return S3NotThereError(
                f"the bucket {self.bucket} is not there", where=where, fix="make it, or correct the store's address"
            )
        if code in _ABSENT:
            return S3NotThereError("the object is not there", where=f"{self.url}/{key}")
        if code in _REFUSED or status in {401, 403}:
            return S3RefusedError(
                f"S3 refused: {error}",
                where=where,
                fix="give the nodes' role s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there",
            )
        if code in _SLOW:
            return S3SlowError(f"S3 is throttling: {error}", where=where, fix="it is tried again later")
        return S3DownError(f"S3 failed: {error}", where=where, fix="it is tried again later")

    def _unreachable(self, error: Exception, key: str) -> AwsError:
        from botocore import exceptions as boto

        where = f"{self.url} ({key})"
        if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
            return S3RefusedError(f"no credentials for S3: {error}", where=where, fix="give the nodes an IAM role")
        if isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError)) or "timed out" in str(error).lower():
            return S3SlowError(f"S3 did not answer in time: {error}", where=where, fix="it is tried again later")
        if isinstance(error, boto.FlexibleChecksumError):
            return S3CorruptError(f"what S3 sent is not what it keeps a checksum of: {error}", where=where)
        return S3DownError(f"S3 cannot be reached: {error}", where=where, fix="check the network and the endpoint")


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _make_client() -> Any:
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
    )
    # a session of its own: boto3's default session is not safe to share between threads
    return boto3.session.Session().client("s3", config=config)
