"""`mirror = "dra"`: FSx exports the files itself, and the mirror says of none that it is there before it is.

FSx is not here: the test puts the objects, as FSx would, in any order and with any checksum.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from s3_standin import Fault, StandIn

from pctool.aws.pace import Pace
from pctool.aws.s3 import S3
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.deliver import Exported
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore
from pctool.errors import IncompleteError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

PART = 1 << 14
FILES = ("a", "b", "c", "d", "e")


class Bench:
    """A run that saves, an FSx that exports what it is told to, and the mirror, on a clock that the test turns."""

    def __init__(self, run: RunDir, url: str, s3: StandIn) -> None:
        self.run = run
        self.s3 = s3
        self.store = S3Store(url, "run", s3=S3(url, part_bytes=PART))
        self.now = 1000.0
        self.mirror = self.new_mirror()

    def new_mirror(self, keep: int | None = None) -> Mirror:
        delivery = Exported(self.store)
        return Mirror(self.run, self.store, 0, keep=keep, delivery=delivery, uploads=self.store, clock=lambda: self.now)

    def save(self, step: int) -> str:
        name, source, entries = checkpoint_name(0, step), self.run.path / "source", {}
        local = PosixStore(self.run.checkpoints)
        for file in FILES:
            source.write_bytes(os.urandom(2 * PART + 7))
            entries[file] = mf.describe_file(source)
            local.put(name, file, source, entries[file])
        manifest = mf.Manifest(run=str(self.run.path), attempt=0, step=step, parent=None, world_size=1, files=entries)
        local.publish(name, mf.encode(manifest))
        Ledger(self.run.ledger).append("committed", attempt=0, name=name, step=step)
        return name

    def export(self, name: str, *files: str, kind: str = "CRC64NVME", data: bytes | None = None) -> None:
        """Put files as FSx would, with a checksum of this kind."""
        for file in files or (*FILES, mf.NAME):
            body = data if data is not None else (self.run.checkpoints / name / file).read_bytes()
            self.store.s3.door(self.store.key(name, file)).ask("put_object", Body=body, ChecksumAlgorithm=kind)

    def poke(self) -> bool:
        """Poke once the backoff is over, and see to it that the mirror writes and removes nothing."""
        self.now += 1000
        self.s3.seen.clear()
        done = self.mirror.poke()
        assert {method for method, _ in self.s3.seen} <= {"GET", "HEAD"}
        return done

    def said(self, kind: str, field: str) -> list[object]:
        return [event.fields[field] for event in Ledger(self.run.ledger).read() if event.event == kind]


@pytest.fixture
def bench(tmp_path: Path, url: str, s3: StandIn) -> Bench:
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    return Bench(run, url, s3)


def test_it_says_what_is_missing_until_all_is_there(bench: Bench) -> None:
    name = bench.save(50)
    assert not bench.poke()
    bench.export(name, mf.NAME, "a")  # in any order
    assert not bench.poke()
    assert not bench.mirror.poke()  # within the backoff nothing is asked
    bench.export(name, "b", "c", "d", "e")
    (bench.run.checkpoints / name / "e").stat()
    assert bench.poke()
    first, second = bench.said("mirror-failed", "error")
    assert "FSx has not exported 5 of 5 yet: a: missing, b: missing, c: missing and 2 more" in str(first)
    assert "FSx has not exported 4 of 5 yet: b: missing" in str(second)
    assert bench.said("mirrored", "name") == [name]
    assert bench.poke()
    assert bench.said("mirrored", "name") == [name]


def test_a_manifest_that_is_late_is_waited_for(bench: Bench) -> None:
    name = bench.save(50)
    bench.export(name, *FILES)
    assert not bench.poke()
    assert "FSx has not exported 1 of 1 yet: MANIFEST" in str(bench.said("mirror-failed", "error"))
    bench.export(name, mf.NAME)
    assert bench.poke()


@pytest.mark.parametrize("kind", ["CRC64NVME", "CRC32"])
def test_bytes_that_are_not_the_manifests_are_never_called_mirrored(bench: Bench, kind: str) -> None:
    """The size is right, and where S3 keeps no CRC64-NVME the object is read back."""
    name = bench.save(50)
    bench.export(name, kind=kind)
    bench.export(name, "b", kind=kind, data=os.urandom(2 * PART + 7))
    assert not bench.poke()
    assert "yet: b: CRC64-NVME" in str(bench.said("mirror-failed", "error"))
    assert bench.said("mirrored", "name") == []
    read_back = [path for method, path in bench.s3.seen if method == "GET" and path.endswith(("/a", "/b"))]
    assert len(read_back) == (0 if kind == "CRC64NVME" else 6)  # three ranges each
    bench.export(name, "b", kind=kind)
    assert bench.poke()
    assert bench.s3.asked("GET", "/a") == 0  # what was read back once is not read again
    assert bench.s3.asked("GET", f"{name}/b") == (0 if kind == "CRC64NVME" else 3)


def test_the_older_ones_do_not_wait_for_the_newest(bench: Bench) -> None:
    older, newest = bench.save(50), bench.save(60)
    bench.export(older)
    assert not bench.poke()
    assert bench.said("mirrored", "name") == [older]
    assert bench.said("mirror-failed", "name") == [newest]
    bench.export(newest)
    assert bench.poke()
    assert bench.said("mirrored", "name") == [older, newest]


def test_the_next_attempts_mirror_looks_only_at_what_was_not_looked_at(bench: Bench) -> None:
    bench.export(bench.save(50))
    assert bench.poke()
    bench.export(bench.save(60))
    bench.mirror = bench.new_mirror()
    assert bench.poke()
    assert bench.s3.asked("HEAD", checkpoint_name(0, 50)) == 0
    assert bench.s3.asked("HEAD", checkpoint_name(0, 60)) == len(FILES)


def test_what_is_not_kept_is_left_to_fsx(bench: Bench) -> None:
    bench.mirror = bench.new_mirror(keep=2)
    for step in (10, 20, 30, 40):
        bench.export(bench.save(step))
        assert bench.poke()
    assert len(bench.store.names()) == 4


def test_what_is_gone_meanwhile_is_left_to_fsx_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    name = bench.save(50)
    bench.export(name, "a")
    bench.store.s3.door(bench.store.key(name, "b")).ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME")

    def removed_just_now(name: str) -> bool:
        PosixStore(bench.run.checkpoints).remove(name)
        return False

    monkeypatch.setattr(bench.mirror, "_there", removed_just_now)
    assert bench.poke()
    assert "removed from the shared file system" in str(bench.said("mirror-failed", "error"))
    assert list(bench.store.sizes(name)) == ["a"]
    assert len(bench.s3.books.open) == 1


def test_what_is_damaged_here_is_named_and_left_to_fsx(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    name = bench.save(50)
    bench.store.s3.door(bench.store.key(name, "b")).ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME")

    def damaged(*_: object) -> None:
        raise IncompleteError("damaged")

    monkeypatch.setattr(bench.mirror.delivery, "files", damaged)
    assert bench.poke()
    assert bench.said("rejected", "name") == [name]
    assert len(bench.s3.books.open) == 1


def test_another_manifest_there_is_another_runs(bench: Bench) -> None:
    name = bench.save(50)
    bench.export(name)
    other = mf.encode(mf.Manifest(run=str(bench.run.path), attempt=0, step=50, parent=None, world_size=2, files={}))
    bench.export(name, mf.NAME, data=other)
    assert not bench.poke()
    assert "with other contents" in str(bench.said("mirror-failed", "error"))


def test_an_s3_that_is_down_is_trouble_and_not_lateness(bench: Bench) -> None:
    bench.export(bench.save(50))
    bench.s3.faults.append(Fault("refused", "HEAD"))
    assert not bench.poke()
    assert "S3 refused" in str(bench.said("mirror-failed", "error"))


def test_reading_back_keeps_to_the_share(bench: Bench) -> None:
    waited: list[float] = []
    bench.store.s3.pace = Pace(1e6, clock=lambda: 0.0, sleep=waited.append)
    bench.export(bench.save(50), kind="CRC32")
    assert bench.poke()
    size = len(FILES) * (2 * PART + 7)
    assert max(waited) == pytest.approx(size / 1e6, rel=0.25)  # all but the last range, on a clock that stands still
