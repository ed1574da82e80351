"""What a restore makes of damage on one tier, on the other, and on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from s3_standin import Fault, StandIn

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import BelowDurableError, find_resume
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import PctoolError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

group_module = pytest.importorskip("pctool.checkpoint.group")
restore_module = pytest.importorskip("pctool.checkpoint.restore")

FIFTY, HUNDRED = checkpoint_name(0, 50), checkpoint_name(0, 100)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run with two complete checkpoints of two files each, as the ledger says too."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    store, source = PosixStore(run.checkpoints), tmp_path / "source"
    for step, parent in ((50, None), (100, FIFTY)):
        name, entries = checkpoint_name(0, step), {}
        for file in ("a", "b"):
            source.write_bytes(f"{name} {file}".encode() * 50)
            entries[file] = mf.describe_file(source)
            store.put(name, file, source, entries[file])
        manifest = mf.Manifest(run="run", attempt=0, step=step, parent=parent, world_size=1, files=entries)
        store.publish(name, mf.encode(manifest))
        Ledger(run.ledger).append("committed", attempt=0, name=name, step=step)
    return run


@pytest.fixture
def mirrored(run: RunDir, url: str, s3: StandIn) -> RunDir:
    assert Mirror(run, S3Store(url, "run"), 0).poke()
    s3.seen.clear()
    return run


def restore(run: RunDir, store: str | None) -> tuple[str, str] | None:
    found = restore_module.find_whole(run, store, group_module.Group(), Ledger(run.ledger), 1)
    return (found.point.name, found.point.tier) if found else None


def rejections(run: RunDir) -> list[tuple[str, str]]:
    return [(e.fields["name"], e.fields["tier"]) for e in Ledger(run.ledger).read() if e.event == "rejected"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def test_what_is_good_is_taken_as_it_is(run: RunDir) -> None:
    assert restore(run, None) == (HUNDRED, "posix")
    assert rejections(run) == []


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("file", ["a", mf.NAME])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(
    run: RunDir, harm: Callable[[Path], None], file: str
) -> None:
    harm(run.checkpoints / HUNDRED / file)
    assert restore(run, None) == (FIFTY, "posix")
    assert rejections(run) == [(HUNDRED, "posix")]


def test_when_all_are_damaged_the_run_stops_and_the_next_claim_knows(run: RunDir) -> None:
    flip(run.checkpoints / FIFTY / "b")
    flip(run.checkpoints / HUNDRED / "a")
    for _ in range(2):  # the ranks look at every byte again, should a claim have let them start
        with pytest.raises(BelowDurableError, match=f"every checkpoint is damaged: {HUNDRED} .*CRC64.*{FIFTY}"):
            restore(run, None)
    assert rejections(run)[:2] == [(HUNDRED, "posix"), (FIFTY, "posix")]
    with pytest.raises(BelowDurableError, match=f"every checkpoint is damaged: {HUNDRED} .*CRC64.*{FIFTY}"):
        find_resume(run, None)
    flip(run.checkpoints / HUNDRED / "a")  # the owner brought it back
    assert restore(run, None) == (HUNDRED, "posix")


def test_another_checkpoint_of_the_name_on_s3_is_rejected_too(mirrored: RunDir, url: str, s3: StandIn) -> None:
    folder = mirrored.checkpoints / HUNDRED
    manifest = mf.read_manifest(folder)
    assert manifest is not None
    (folder / mf.NAME).write_bytes(mf.encode(replace(manifest, time=1.0)))
    flip(folder / "a")
    assert restore(mirrored, url) == (FIFTY, "posix")
    assert rejections(mirrored) == [(HUNDRED, "posix"), (HUNDRED, "s3")]


def test_a_ledger_that_cannot_be_read_is_said_as_that(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(ledger: Ledger) -> None:
        raise OSError(116, "Stale file handle", str(ledger.path))

    monkeypatch.setattr(Ledger, "read", stale)
    with pytest.raises(StoreUnreadableError, match=r"no checkpoint could be restored: .*Stale file handle"):
        restore(run, None)


def test_a_vanished_newest_stops_the_ranks_too(run: RunDir) -> None:
    PosixStore(run.checkpoints).remove(HUNDRED)
    with pytest.raises(BelowDurableError):
        restore(run, None)


def test_an_s3_that_goes_down_meanwhile_is_said_as_that(mirrored: RunDir, url: str, s3: StandIn) -> None:
    flip(mirrored.checkpoints / HUNDRED / "a")
    s3.faults.append(Fault("broken", "GET", "/a"))
    with pytest.raises(StoreUnreadableError, match="no checkpoint could be restored"):
        restore(mirrored, url)
    assert rejections(mirrored) == []
    s3.faults.append(Fault("broken"))
    with pytest.raises(StoreUnreadableError):
        restore(mirrored, url)


def test_only_the_damaged_file_is_fetched_from_s3(mirrored: RunDir, url: str, s3: StandIn) -> None:
    flip(mirrored.checkpoints / HUNDRED / "a")
    assert restore(mirrored, url) == (HUNDRED, "s3")
    assert mf.verify(mirrored.checkpoints / HUNDRED).ok
    fetched = [path for method, path in s3.seen if method == "GET" and path.endswith(("/a", "/b"))]
    assert len(fetched) == 1
    assert fetched[0].endswith(f"{HUNDRED}/a")
    assert rejections(mirrored) == []


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
def test_a_damaged_manifest_is_fetched_too(
    mirrored: RunDir, url: str, s3: StandIn, harm: Callable[[Path], None]
) -> None:
    harm(mirrored.checkpoints / HUNDRED / mf.NAME)
    assert restore(mirrored, url) == (HUNDRED, "s3")
    assert mf.verify(mirrored.checkpoints / HUNDRED).ok


def test_all_is_fetched_where_the_run_directory_has_nothing(mirrored: RunDir, url: str, s3: StandIn) -> None:
    for name in (FIFTY, HUNDRED):
        PosixStore(mirrored.checkpoints).remove(name)
    assert restore(mirrored, url) == (HUNDRED, "s3")
    assert mf.verify(mirrored.checkpoints / HUNDRED).ok
    assert PosixStore(mirrored.checkpoints).names() == [HUNDRED]


def test_what_was_fetched_before_the_store_went_down_is_not_fetched_again(
    mirrored: RunDir, url: str, s3: StandIn
) -> None:
    PosixStore(mirrored.checkpoints).remove(HUNDRED)
    s3.faults.append(Fault("broken", "GET", f"{HUNDRED}/b"))
    with pytest.raises(StoreUnreadableError):
        restore(mirrored, url)
    s3.faults.clear()
    s3.seen.clear()
    assert restore(mirrored, url) == (HUNDRED, "s3")
    assert [path for method, path in s3.seen if method == "GET" and path.endswith(f"{HUNDRED}/a")] == []
    assert mf.verify(mirrored.checkpoints / HUNDRED).ok


def test_what_lies_there_damaged_is_fetched_all_the_same(mirrored: RunDir, url: str, s3: StandIn) -> None:
    flip(mirrored.checkpoints / HUNDRED / "a")
    (mirrored.checkpoints / HUNDRED / mf.NAME).unlink()
    assert restore(mirrored, url) == (HUNDRED, "s3")
    assert mf.verify(mirrored.checkpoints / HUNDRED).ok


def test_damaged_on_both_tiers_the_one_before_is_used(mirrored: RunDir, url: str, s3: StandIn) -> None:
    """The byte flips on the way down from S3: neither copy is what the manifest says."""
    flip(mirrored.checkpoints / HUNDRED / "a")
    s3.faults.append(Fault("flip", "GET", f"{HUNDRED}/a"))
    assert restore(mirrored, url) == (FIFTY, "posix")
    assert rejections(mirrored) == [(HUNDRED, "posix"), (HUNDRED, "s3")]
    assert not mf.verify(mirrored.checkpoints / HUNDRED).ok


def test_a_store_that_is_down_is_an_error_not_a_loss(mirrored: RunDir, url: str, s3: StandIn) -> None:
    s3.faults.append(Fault("refused"))
    with pytest.raises(PctoolError, match="S3 refused"):
        restore(mirrored, url)
    assert rejections(mirrored) == []
