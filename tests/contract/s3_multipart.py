"""Multipart uploads as S3 keeps books of them, for the stand-in: moto says no part's checksum, no date, no refusal."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from pctool.crc64 import combine, crc64, text

_SUM = "x-amz-checksum-crc64nvme"
Refusal = tuple[int, str]


@dataclass(frozen=True)
class Ask:
    """One request, taken apart."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]

    @property
    def kind(self) -> str:
        """Return which of S3's operations on multipart uploads this is, "" for none."""
        if "uploads" in self.query:
            return {"POST": "begin", "GET": "list-uploads"}.get(self.method, "")
        if "uploadId" not in self.query:
            return ""
        return {"PUT": "part", "POST": "complete", "GET": "list-parts", "DELETE": "abort"}.get(self.method, "")


def parse(method: str, path: str) -> Ask:
    """Take a path-style request line apart."""
    split = urlsplit(path)
    bucket, _, key = unquote(split.path.lstrip("/")).partition("/")
    query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
    return Ask(method, bucket, key, query)


@dataclass
class _Part:
    size: int
    crc: int
    etag: str


@dataclass
class _Upload:
    bucket: str
    key: str
    id: str
    initiated: float
    algorithm: str = "CRC64NVME"
    parts: dict[int, _Part] = field(default_factory=dict)


class Books:
    """All open uploads. S3 takes a part of, completes and aborts only what is open."""

    def __init__(self) -> None:
        self.open: dict[str, _Upload] = {}
        self._lock = threading.Lock()

    def refuse(self, ask: Ask, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        """Return S3's refusal of a request, None if it takes it."""
        if ask.kind not in {"part", "complete", "list-parts", "abort"}:
            return None
        upload = self.open.get(ask.query["uploadId"])
        if upload is None:
            return 404, "NoSuchUpload"
        if ask.kind == "part" and _SUM in headers and upload.algorithm != "CRC64NVME":
            return 400, "InvalidRequest"
        return self._refuse_whole(upload, headers, body) if ask.kind == "complete" else None

    def _refuse_whole(self, upload: _Upload, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        value, size = 0, 0
        for number, etag in _named(body):
            part = upload.parts.get(number)
            if part is None or part.etag != etag:
                return 400, "InvalidPart"
            value, size = combine(value, part.crc, part.size), size + part.size
        if headers.get(_SUM) != text(value):
            return 400, "BadDigest"
        return (400, "InvalidRequest") if headers.get("x-amz-mp-object-size") != str(size) else None

    def note(self, ask: Ask, headers: Mapping[str, str], body: bytes, answer: bytes, etag: str) -> None:
        """Write down what S3 has done."""
        with self._lock:
            if ask.kind == "begin":
                found = re.search(rb"<UploadId>(.*?)</UploadId>", answer)
                assert found is not None
                name = found[1].decode()
                algorithm = headers.get("x-amz-checksum-algorithm", "CRC64NVME")
                self.open[name] = _Upload(ask.bucket, ask.key, name, time.time(), algorithm)
            elif ask.kind == "part":
                part = _Part(len(body), crc64(body), etag)
                self.open[ask.query["uploadId"]].parts[int(ask.query["partNumber"])] = part
            elif ask.kind in {"complete", "abort"}:
                self.open.pop(ask.query["uploadId"], None)

    def listed(self, ask: Ask) -> bytes | None:
        """Return the answer to one of the two listings, None if the request is none."""
        if ask.kind == "list-uploads":
            return self._uploads(ask)
        return self._parts(self.open[ask.query["uploadId"]], ask) if ask.kind == "list-parts" else None

    def _uploads(self, ask: Ask) -> bytes:
        after = (ask.query.get("key-marker", ""), ask.query.get("upload-id-marker", ""))
        ours = [one for one in self.open.values() if one.bucket == ask.bucket]
        match = [one for one in ours if one.key.startswith(ask.query.get("prefix", "")) and (one.key, one.id) > after]
        page = sorted(match, key=lambda one: (one.key, one.id))[:1000]
        entries = "".join(
            f"<Upload><Key>{escape(one.key)}</Key><UploadId>{one.id}</UploadId>"
            f"<Initiated>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(one.initiated))}</Initiated>"
            f"<ChecksumAlgorithm>{one.algorithm}</ChecksumAlgorithm></Upload>"
            for one in page
        )
        more = len(page) < len(match)
        markers = f"<NextKeyMarker>{escape(page[-1].key)}</NextKeyMarker>" if more else ""
        markers += f"<NextUploadIdMarker>{page[-1].id}</NextUploadIdMarker>" if more else ""
        return _document("ListMultipartUploadsResult", more, markers + entries)

    def _parts(self, upload: _Upload, ask: Ask) -> bytes:
        after, most = int(ask.query.get("part-number-marker", 0)), min(int(ask.query.get("max-parts", 1000)), 1000)
        match = sorted((number, part) for number, part in upload.parts.items() if number > after)
        page = match[:most]
        entries = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part.etag)}</ETag><Size>{part.size}</Size>"
            f"<ChecksumCRC64NVME>{text(part.crc)}</ChecksumCRC64NVME></Part>"
            for number, part in page
        )
        more = len(page) < len(match)
        marker = f"<NextPartNumberMarker>{page[-1][0]}</NextPartNumberMarker>" if more else ""
        return _document("ListPartsResult", more, marker + entries)


def _named(body: bytes) -> list[tuple[int, str]]:
    """Return the parts that a request to complete names."""
    document = body.decode()
    numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", document)]
    etags = [etag.replace("&quot;", '"') for etag in re.findall(r"<ETag>(.*?)</ETag>", document)]
    return list(zip(numbers, etags, strict=True))


def _document(name: str, more: bool, inner: str) -> bytes:
    head = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return f"{head}<IsTruncated>{str(more).lower()}</IsTruncated>{inner}</{name}>".encode()
