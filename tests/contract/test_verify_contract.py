"""What `pctool ckpt verify` finds, on both tiers: each way in which a checkpoint comes to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
from made import FIRST, NEWEST, SHARDS, flip, make_run
from s3_standin import Fault, StandIn

from pctool.aws.s3 import S3, S3DownError, Stored
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore, Store
from pctool.checkpoint.target import resolve
from pctool.checkpoint.verify import verify, verify_copy
from pctool.run.layout import RunDir

ONE, OTHER = SHARDS


class Files(Protocol):
    """The files of a run's checkpoints on one tier, to be harmed."""

    touched: list[tuple[str, str]]

    @property
    def store(self) -> Store: ...
    def read(self, name: str, file: str) -> bytes: ...
    def write(self, name: str, file: str, data: bytes) -> None: ...
    def delete(self, name: str, file: str) -> None: ...


class OnDisk:
    def __init__(self, run: RunDir) -> None:
        self.store = PosixStore(run.checkpoints)
        self.touched: list[tuple[str, str]] = []

    def read(self, name: str, file: str) -> bytes:
        return (self.store.folder / name / file).read_bytes()

    def write(self, name: str, file: str, data: bytes) -> None:
        self.touched.append((name, file))
        (self.store.folder / name / file).write_bytes(data)

    def delete(self, name: str, file: str) -> None:
        self.touched.append((name, file))
        (self.store.folder / name / file).unlink()


class OnS3:
    def __init__(self, run: RunDir, url: str, scratch: Path) -> None:
        self.store = S3Store(url, run.path.name)
        self.touched: list[tuple[str, str]] = []
        self.scratch = scratch

    def read(self, name: str, file: str) -> bytes:
        data = self.store.s3.read(f"{self.store.root}/{name}/{file}")
        assert data is not None
        return data

    def write(self, name: str, file: str, data: bytes) -> None:
        self.delete(name, file)
        self.scratch.write_bytes(data)
        self.store.put(name, file, self.scratch, mf.describe_file(self.scratch))

    def delete(self, name: str, file: str) -> None:
        self.touched.append((name, file))
        self.store.s3.delete([f"{self.store.root}/{name}/{file}"])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "gpt")


@pytest.fixture
def keeps_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make S3 keep the checksum of what it received: moto drops that of a PUT."""
    stored = S3.stored

    def with_sum(s3: S3, key: str) -> Stored | None:
        found, data = stored(s3, key), s3.read(key)
        return replace(found, crc64nvme=mf.crc64nvme([data])) if found and data is not None else None

    monkeypatch.setattr(S3, "stored", with_sum)


@pytest.fixture(params=["posix", "s3"])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def files(tier: str, run: RunDir, tmp_path: Path, request: pytest.FixtureRequest) -> Files:
    if tier == "posix":
        return OnDisk(run)
    url = request.getfixturevalue("url")
    request.getfixturevalue("keeps_sums")
    assert Mirror(run, S3Store(url, "gpt"), 0).poke()
    return OnS3(run, url, tmp_path / "scratch")


def findings_of(files: Files, name: str) -> dict[str, str]:
    """Return what is found wrong, by file; S3 is asked for its checksums and then read, which must agree."""
    quick, read = (verify_copy(files.store, name, read=read) for read in (False, True))
    assert [finding.file for finding in quick.findings] == [finding.file for finding in read.findings]
    return {finding.file: finding.what for finding in read.findings}


def truncate(files: Files) -> None:
    files.write(NEWEST, ONE, files.read(NEWEST, ONE)[:-1])


def turn_a_bit(files: Files) -> None:
    files.write(NEWEST, ONE, flip(files.read(NEWEST, ONE)))


def delete(files: Files) -> None:
    files.delete(NEWEST, ONE)


def overwrite_by_a_duplicate(files: Files) -> None:
    files.write(NEWEST, ONE, files.read(NEWEST, OTHER))


def put_a_stale_shard(files: Files) -> None:
    files.write(NEWEST, ONE, files.read(FIRST, ONE))


def put_a_stale_index(files: Files) -> None:
    files.write(NEWEST, ".metadata", flip(files.read(FIRST, ".metadata")))


def swap_two_shards(files: Files) -> None:
    one, other = files.read(NEWEST, ONE), files.read(NEWEST, OTHER)
    files.write(NEWEST, ONE, other)
    files.write(NEWEST, OTHER, one)


def exchange_manifests(files: Files) -> None:
    first, newest = files.read(FIRST, mf.NAME), files.read(NEWEST, mf.NAME)
    files.write(FIRST, mf.NAME, newest)
    files.write(NEWEST, mf.NAME, first)


def put_a_position_of_another_step(files: Files) -> None:
    record = json.loads(files.read(NEWEST, mf.NAME))
    del record["sha256"]
    record["position"]["step"] = 10
    files.write(NEWEST, mf.NAME, json.dumps({**record, "sha256": mf._digest(record)}).encode())


def delete_the_manifest(files: Files) -> None:
    files.delete(NEWEST, mf.NAME)


def alter_the_manifest(files: Files) -> None:
    files.write(NEWEST, mf.NAME, files.read(NEWEST, mf.NAME).replace(b'"world_size": 2', b'"world_size": 3'))


HARMS: dict[Callable[[Files], None], dict[str, str]] = {  # -> what is found, by file
    truncate: {ONE: "where the manifest says"},
    turn_a_bit: {ONE: "CRC64-NVME"},
    delete: {ONE: "missing"},
    overwrite_by_a_duplicate: {ONE: "CRC64-NVME"},
    put_a_stale_shard: {ONE: "CRC64-NVME"},
    put_a_stale_index: {".metadata": "CRC64-NVME"},
    swap_two_shards: {ONE: "CRC64-NVME", OTHER: "CRC64-NVME"},
    exchange_manifests: {mf.NAME: f"it is that of checkpoint {FIRST}"},
    put_a_position_of_another_step: {mf.NAME: "step 20 with the position of step 10"},
    delete_the_manifest: {mf.NAME: "it was never finished"},
    alter_the_manifest: {mf.NAME: "it was altered"},
}


def test_every_harm_is_found_in_the_file_that_it_was_done_to(files: Files) -> None:
    of_newest = {(NEWEST, file): files.read(NEWEST, file) for file in (ONE, OTHER, ".metadata", mf.NAME)}
    whole = {**of_newest, (FIRST, mf.NAME): files.read(FIRST, mf.NAME)}
    for harm, expected in HARMS.items():
        files.touched.clear()
        harm(files)
        found = findings_of(files, NEWEST)
        assert found.keys() == expected.keys(), harm
        assert all(said in found[file] for file, said in expected.items()), harm
        for name, file in set(files.touched):
            files.write(name, file, whole[name, file])
    assert findings_of(files, NEWEST) == findings_of(files, FIRST) == {}


def test_a_good_one_is_good_whatever_lies_beside(files: Files, tier: str) -> None:
    files.write(NEWEST, "copy of a shard", files.read(NEWEST, ONE))
    files.write(NEWEST, "notes", b"?")
    report = verify_copy(files.store, NEWEST, read=False)
    assert (report.ok, report.files, report.read) == (True, 3, tier == "posix")
    assert [note.split(":")[0] for note in report.notes] == ["copy of a shard", "notes"]
    assert f"a duplicate of {ONE}" in report.notes[0]
    assert "duplicate" not in report.notes[1]


def test_what_s3_sends_is_what_is_judged(run: RunDir, url: str, s3: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    store, stored = S3Store(url, "gpt"), S3.stored
    assert Mirror(run, store, 0).poke()
    s3.faults.append(Fault("flip", "GET", ONE, times=1))
    assert [finding.file for finding in verify_copy(store, NEWEST).findings] == [ONE]
    s3.faults.append(Fault("cut", "GET", ONE, times=1))  # it breaks off once: begun anew
    assert verify_copy(store, NEWEST).ok

    def without_sum(door: S3, key: str) -> Stored | None:
        found = stored(door, key)
        return replace(found, crc64nvme=None) if found else None

    monkeypatch.setattr(S3, "stored", without_sum)  # nothing to compare with: read after all
    report = verify_copy(store, NEWEST, read=False)
    assert (report.ok, report.read) == (True, True)
    s3.faults.append(Fault("flip", "GET", ONE, times=1))
    assert [finding.file for finding in verify_copy(store, NEWEST, read=False).findings] == [ONE]


def test_one_that_is_pruned_meanwhile_is_not_called_damaged(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(run.checkpoints)
    monkeypatch.setattr("pctool.checkpoint.verify.FILES_AT_ONCE", 1)
    report = verify_copy(store, FIRST, tell=lambda _: store.remove(FIRST))
    assert (report.ok, report.files) == (True, 0)
    assert report.notes == ("it was removed, or saved anew, while it was checked",)


def test_a_tier_that_cannot_be_read_is_no_finding(run: RunDir, url: str, s3: StandIn) -> None:
    assert Mirror(run, S3Store(url, "gpt"), 0).poke()
    s3.faults.append(Fault("broken", "HEAD", ONE))
    with pytest.raises(S3DownError):
        verify(resolve(str(run.path), store=url))


def test_both_tiers_are_checked_and_compared(run: RunDir, url: str, s3: StandIn) -> None:
    assert Mirror(run, S3Store(url, "gpt"), 0).poke()
    target = resolve(str(run.path), store=url)
    assert [(report.name, report.tier, report.ok) for report in verify(target)] == [
        (NEWEST, "posix", True),
        (NEWEST, "s3", True),
    ]
    manifest = mf.read_manifest(run.checkpoints / NEWEST)
    assert manifest is not None
    (run.checkpoints / NEWEST / mf.NAME).write_bytes(mf.encode(replace(manifest, time=1.0)))
    here, there = verify(target)
    assert here.ok
    assert "another checkpoint of this name" in there.findings[0].what


def test_all_excuses_what_was_never_finished_but_not_what_was(run: RunDir) -> None:
    (run.checkpoints / "000000-00000030").mkdir()  # a torn save
    target = resolve(str(run.path), store=None)
    assert [report.name for report in verify(target)] == [NEWEST]
    reports = verify(target, every=True)
    assert [(report.name[-2:], report.ok, bool(report.notes)) for report in reports] == [
        ("30", True, True),
        ("20", True, False),
        ("10", True, False),
    ]
    (run.checkpoints / NEWEST / mf.NAME).unlink()  # the ledger says that it was complete
    assert [report.ok for report in verify(target, every=True)] == [True, False, True]
    named = resolve(str(run.path), store=None, at="000000-00000030")
    assert not verify(named)[0].ok
