"""Files to S3 and back in parts: what is sent, what is believed, what is sent again, and what trouble makes of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from s3_multipart import _Part, parse
from s3_standin import Fault, StandIn, wrong_sum

from pctool.aws import s3parts
from pctool.aws.pace import Pace
from pctool.aws.s3 import (
    S3,
    S3ClockError,
    S3CorruptError,
    S3CredentialsError,
    S3DownError,
    S3NotThereError,
    S3RefusedError,
    S3SlowError,
)
from pctool.checkpoint import manifest as mf
from pctool.crc64 import crc64, text
from pctool.errors import FencedError, IncompleteError

PART = 1 << 14
FIVE = 4 * PART + 17  # five parts


@pytest.fixture
def door(url: str) -> S3:
    return S3(url, part_bytes=PART)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source", FIVE)


def make(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


def put(door: S3, source: Path, key: str = "big", upload: str | None = None) -> None:
    entry = mf.describe_file(source)
    door.put_file(key, source, entry.size, entry.crc64nvme, upload=upload)


def is_there(door: S3, source: Path, key: str = "big") -> bool:
    kept = door.stored(key)
    return kept is not None and mf.FileEntry(size=kept.size, crc64nvme=kept.crc64nvme or "") == mf.describe_file(source)


@pytest.mark.parametrize("size", [0, PART - 1, PART, PART + 1, FIVE])
def test_what_is_larger_than_a_part_goes_in_parts_and_comes_in_ranges(
    door: S3, s3: StandIn, tmp_path: Path, size: int
) -> None:
    source = make(tmp_path / "source", size)
    put(door, source)
    assert s3.asked("PUT", "partNumber") == (0 if size <= PART else -(-size // PART))
    door.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert s3.asked("GET", "/big") == -(-size // PART)


def test_the_source_is_read_once(door: S3, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, read, real = mf.describe_file(source), [], os.pread

    def counted(fd: int, length: int, at: int) -> bytes:
        read.append((at, length))
        return real(fd, length, at)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(mf, "crc64nvme_file", lambda path: pytest.fail("the file is read apart from its parts"))
    door.put_file("big", source, entry.size, entry.crc64nvme)
    assert sorted(read) == [(start, min(PART, FIVE - start)) for start in range(0, FIVE, PART)]


def test_parts_of_several_files_are_under_way_at_once_and_never_more_than_said(
    url: str, s3: StandIn, tmp_path: Path
) -> None:
    door = S3(url, part_bytes=PART, parts_at_once=3)
    files = [make(tmp_path / f"file-{n}", FIVE) for n in range(4)]
    put_together(door, files)
    assert 1 < s3.parts_most <= 3


def test_an_upload_is_gone_on_with_and_only_what_is_missing_is_sent(url: str, s3: StandIn, source: Path) -> None:
    s3.faults.append(Fault("broken", "PUT", "partNumber=3"))
    with pytest.raises(S3DownError):
        put(S3(url, part_bytes=PART, parts_at_once=1), source)
    s3.faults.clear()
    s3.seen.clear()
    door = S3(url, part_bytes=PART)  # another process's
    (upload,) = door.uploads("")
    assert upload.key == "big"
    there = set(s3.books.open[upload.id].parts)
    put(door, source, upload=upload.id)
    sent = {parse(method, path).query["partNumber"] for method, path in s3.seen if "partNumber" in path}
    assert {1, 2} <= there
    assert {int(number) for number in sent} == {1, 2, 3, 4, 5} - there
    assert s3.asked("PUT", "partNumber") == len(sent)
    assert is_there(door, source)
    assert door.uploads("") == []


def test_a_part_that_is_there_is_not_believed_if_the_source_says_otherwise(
    door: S3, s3: StandIn, source: Path, tmp_path: Path
) -> None:
    s3.faults.append(Fault("broken", "POST", "uploadId"))
    other = tmp_path / "other"
    other.write_bytes(source.read_bytes()[:PART] + os.urandom(PART) + source.read_bytes()[2 * PART :])
    with pytest.raises(S3DownError):
        put(door, other)  # as if the second part had been written over since
    s3.faults.clear()
    s3.seen.clear()
    put(door, source, upload=door.uploads("")[0].id)
    assert [path for method, path in s3.seen if method == "PUT" and "partNumber=2" not in path] == []
    assert s3.asked("PUT", "partNumber=2") == 1
    assert is_there(door, source)


def test_parts_of_another_length_are_sent_anew(url: str, s3: StandIn, source: Path) -> None:
    s3.faults.append(Fault("broken", "POST", "uploadId"))
    with pytest.raises(S3DownError):
        put(S3(url, part_bytes=PART // 2), source)
    s3.faults.clear()
    door = S3(url, part_bytes=PART)
    put(door, source, upload=door.uploads("")[0].id)
    assert is_there(door, source)


def test_all_pages_of_an_uploads_parts_are_read(door: S3, s3: StandIn, source: Path) -> None:
    began = door.door("big").ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
    parts = {number: _Part(PART, number, f'"{number}"') for number in range(1, 2501)}
    s3.books.open[began["UploadId"]].parts = parts
    sending = s3parts.Upload(door.door("big"), -1, size=0, crc64nvme="", where="", pace=Pace())
    found = sending._listed(began["UploadId"])
    assert found == {n: s3parts.SentPart(PART, text(n), f'"{n}"') for n in range(1, 2501)}
    assert s3.asked("GET", "uploadId") == 3


def test_all_pages_of_open_uploads_are_read(door: S3, s3: StandIn) -> None:
    began = door.door("a/big").ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME")
    first = s3.books.open[began["UploadId"]]
    for n in range(1500):
        s3.books.open[f"u{n}"] = type(first)(first.bucket, f"{first.key}{n}", f"u{n}", first.initiated + n)
    found = door.uploads("a")
    assert [upload.key for upload in found[:2]] == ["a/big1499", "a/big1498"]
    assert len(found) == 1501
    assert door.uploads("b") == []


@pytest.mark.parametrize("size", [PART, FIVE])
def test_a_source_that_is_not_what_it_should_be_is_never_completed(
    door: S3, s3: StandIn, tmp_path: Path, size: int
) -> None:
    source = make(tmp_path / "source", size)
    entry = mf.describe_file(source)
    data = source.read_bytes()
    source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IncompleteError, match=f"source: CRC64-NVME .* where the manifest says {entry.crc64nvme[:4]}"):
        door.put_file("big", source, entry.size, entry.crc64nvme)
    source.write_bytes(data[:-1])
    with pytest.raises(IncompleteError, match=f"{size - 1} bytes where the manifest says {size}"):
        door.put_file("big", source, entry.size, entry.crc64nvme)
    assert door.stored("big") is None
    assert not any("uploadId" in path for method, path in s3.seen if method == "POST")
    for upload in door.uploads(""):
        door.abort(upload)
        door.abort(upload)  # one that is gone is no error
    assert door.uploads("") == []


def test_s3_refuses_a_sum_that_is_wrong(door: S3, s3: StandIn, source: Path) -> None:
    """So does the stand-in: of an object, of a part, of a whole of parts, and of a kind that was not begun with."""
    one, data = door.door("big"), source.read_bytes()[:PART]
    with pytest.raises(S3CorruptError, match="BadDigest"):
        one.ask("put_object", Body=data, ChecksumCRC64NVME=wrong_sum())
    began = one.ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
    part: dict[str, Any] = {"UploadId": began["UploadId"], "PartNumber": 1, "Body": data}
    with pytest.raises(S3CorruptError, match="BadDigest"):
        one.ask("upload_part", ChecksumCRC64NVME=wrong_sum(), **part)
    for named in ({"ChecksumAlgorithm": "CRC32"}, {}):
        with pytest.raises(S3DownError, match="expected checksum Type: crc64nvme, actual checksum Type: crc32"):
            one.ask("upload_part", **named, **part)
    sent = one.ask("upload_part", ChecksumCRC64NVME=text(crc64(data)), **part)
    whole = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": sent["ETag"]}]}, "UploadId": began["UploadId"]}
    with pytest.raises(S3CorruptError, match="BadDigest"):
        one.ask("complete_multipart_upload", ChecksumCRC64NVME=wrong_sum(), MpuObjectSize=PART, **whole)
    with pytest.raises(S3DownError, match="InvalidRequest"):
        one.ask("complete_multipart_upload", ChecksumCRC64NVME=text(crc64(data)), MpuObjectSize=PART + 1, **whole)
    assert door.stored("big") is None


@pytest.mark.parametrize("kind", ["throttled", "broken", "failed-after", "reset", "spoil", "lost-answer"])
@pytest.mark.parametrize("size", [PART, FIVE])
def test_trouble_with_what_is_sent_is_got_over(door: S3, s3: StandIn, tmp_path: Path, kind: str, size: int) -> None:
    source = make(tmp_path / "source", size)
    s3.faults.append(Fault(kind, "PUT", "/big", times=2))  # more than botocore tries by itself
    put(door, source)
    assert is_there(door, source)


@pytest.mark.parametrize(
    ("kind", "error"), [("throttled", S3SlowError), ("broken", S3DownError), ("reset", S3DownError)]
)
def test_trouble_that_stays_has_a_name_and_is_gone_on_from(
    door: S3, s3: StandIn, source: Path, kind: str, error: type[Exception]
) -> None:
    s3.faults.append(Fault(kind, "PUT", "partNumber=5"))
    with pytest.raises(error):
        put(door, source)
    s3.faults.clear()
    s3.seen.clear()
    put(door, source, upload=door.uploads("")[0].id)
    assert s3.asked("PUT", "partNumber") == 1
    assert is_there(door, source)


@pytest.mark.parametrize("kind", ["lost-answer", "failed-after", "broken", "throttled"])
def test_an_answer_to_the_completion_that_is_lost_or_late_is_no_loss(
    door: S3, s3: StandIn, source: Path, kind: str
) -> None:
    s3.faults.append(Fault(kind, "POST", "uploadId", times=1))
    put(door, source)
    assert is_there(door, source)
    assert s3.asked("PUT", "partNumber") == 5


@pytest.mark.parametrize("kind", ["conflict", "gone"])
def test_where_another_is_in_the_way_the_upload_is_begun_anew(door: S3, s3: StandIn, source: Path, kind: str) -> None:
    s3.faults.append(Fault(kind, "POST", "uploadId", times=2))
    put(door, source)
    assert is_there(door, source)
    assert s3.asked("POST", "uploads") == 3
    assert s3.asked("PUT", "partNumber") == 15


def test_an_upload_that_somebody_aborted_is_begun_anew(door: S3, s3: StandIn, source: Path) -> None:
    put(door, source, upload="no-such-upload")
    assert is_there(door, source)


def test_what_is_raised_before_a_part_ends_the_upload_and_leaves_it_open(url: str, s3: StandIn, source: Path) -> None:
    calls = iter(range(100))

    def check() -> None:
        if next(calls) >= 2:
            raise FencedError("a newer attempt")

    door = S3(url, part_bytes=PART, parts_at_once=1, check_part=check)
    with pytest.raises(FencedError):
        put(door, source)
    assert s3.asked("PUT", "partNumber") == 2
    assert s3.asked("DELETE", "") == 0
    assert [upload.key for upload in door.uploads("")] == ["big"]


def test_a_conflict_that_stays_ends(door: S3, s3: StandIn, source: Path) -> None:
    s3.faults.append(Fault("conflict", "POST", "uploadId"))
    with pytest.raises(S3SlowError, match="stays under way"):
        put(door, source)
    assert door.stored("big") is None


@pytest.mark.parametrize("size", [PART, FIVE])
def test_an_object_that_is_silently_short_is_found_and_sent_again(
    door: S3, s3: StandIn, tmp_path: Path, size: int
) -> None:
    source = make(tmp_path / "source", size)
    s3.faults.append(Fault("lose", "PUT", "/big", times=1))
    with pytest.raises(S3CorruptError, match="S3 keeps"):
        put(door, source)
    put(door, source)
    assert is_there(door, source)


def test_a_clock_that_is_off_says_so_and_is_not_asked_again(door: S3, s3: StandIn, source: Path) -> None:
    s3.faults.append(Fault("skewed", "PUT"))
    with pytest.raises(S3ClockError, match="chronyc"):
        put(door, source)
    assert s3.asked("PUT", "") <= 5  # once a part


def test_credentials_that_were_renewed_are_found(
    url: str, s3: StandIn, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of credentials, which botocore reads once a client, is written anew while parts are under way."""
    file = tmp_path / "credentials"

    def write(name: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={name}\naws_secret_access_key=x\n")

    write("OLD")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    door = S3(url, part_bytes=PART)
    assert door.stored("big") is None
    s3.expired.add("OLD")
    with pytest.raises(S3CredentialsError, match="have expired"):
        put(door, source)
    write("NEW")
    put(door, source)
    assert is_there(door, source)


def test_no_credentials_at_all_are_found_once_there_are_some(
    url: str, s3: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = os.environ["AWS_ACCESS_KEY_ID"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    door = S3(url)
    with pytest.raises(S3RefusedError, match="no credentials"):
        door.stored("k")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    assert door.stored("k") is None


@pytest.mark.parametrize("kind", ["cut", "curtail", "throttled", "broken", "lost-answer"])
def test_a_range_that_breaks_off_is_fetched_anew_alone(
    door: S3, s3: StandIn, source: Path, tmp_path: Path, kind: str
) -> None:
    put(door, source)
    s3.faults.append(Fault(kind, "GET", "/big", times=1))
    door.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert s3.asked("GET", "/big") == 6


@pytest.mark.parametrize(
    ("kind", "error"), [("cut", S3DownError), ("curtail", S3DownError), ("flip", S3CorruptError), ("hang", S3SlowError)]
)
def test_a_download_that_stays_broken_ends_and_leaves_nothing(
    door: S3,
    s3: StandIn,
    source: Path,
    tmp_path: Path,
    kind: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(door, source)
    if kind == "hang":
        door._client().meta.config.read_timeout = 0.3
        monkeypatch.setattr("pctool.aws.s3.READ_TIMEOUT_S", 0.3)
        door._made = None
    s3.faults.append(Fault(kind, "GET", "/big"))
    with pytest.raises(error):
        door.download("big", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_a_bit_that_flips_on_the_way_down_is_found_and_got_over(
    door: S3, s3: StandIn, source: Path, tmp_path: Path
) -> None:
    put(door, source)
    s3.faults.append(Fault("flip", "GET", "/big", times=1))
    door.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_an_object_that_is_replaced_meanwhile_is_never_mixed(
    door: S3, s3: StandIn, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(door, source)
    old = door.stored("big")
    assert old is not None
    put(door, make(source, FIVE))
    with pytest.raises(S3CorruptError, match="replaced while it was read"):
        door.checksum("big", old)
    door.download("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_what_is_not_there_is_not_downloaded(door: S3, s3: StandIn, tmp_path: Path) -> None:
    with pytest.raises(S3NotThereError):
        door.download("big", tmp_path / "back")
    assert s3.asked("GET", "/big") == 0


def put_together(door: S3, files: list[Path]) -> None:
    threads = [threading.Thread(target=put, args=(door, file, file.name)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_there(door, file, file.name) for file in files)


def test_half_the_rate_takes_twice_the_time(url: str, s3: StandIn, tmp_path: Path) -> None:
    """Two files at once, ten parts in all, of which the first is let pass; on a clock that stands still."""
    files = [make(tmp_path / f"file-{n}", 5 * PART) for n in range(2)]
    longest = []
    for rate in (400_000, 200_000):
        waited: list[float] = []
        pace = Pace(rate, clock=lambda: 0.0, sleep=waited.append)
        put_together(S3(url, part_bytes=PART, pace=pace), files)
        longest.append(max(waited))
        assert len(waited) == 9
    assert longest == [pytest.approx(9 * PART / 400_000), pytest.approx(9 * PART / 200_000)]


def test_the_rate_is_kept(url: str, s3: StandIn, tmp_path: Path) -> None:
    files = [make(tmp_path / f"file-{n}", 5 * PART) for n in range(2)]
    began = time.monotonic()
    put_together(S3(url, part_bytes=PART, pace=Pace(100_000)), files)
    assert time.monotonic() - began >= 9 * PART / 100_000


@pytest.mark.parametrize(
    "refused", [("POST", "?uploads"), ("GET", "?uploads"), ("GET", "uploadId"), ("DELETE", "uploadId")]
)
def test_rights_to_uploads_that_are_missing_are_named(door: S3, s3: StandIn, refused: tuple[str, str]) -> None:
    door.check_uploads("k")
    assert s3.books.open == {}
    s3.faults.append(Fault("refused", *refused))
    with pytest.raises(S3RefusedError, match="s3:ListBucketMultipartUploads, s3:ListMultipartUploadParts"):
        door.check_uploads("k")
    assert len(s3.books.open) == (refused[0] == "DELETE")
