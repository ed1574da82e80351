"""Another run refers to a checkpoint: it stays as long as that run directory does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import refs
from pctool.checkpoint.lineage import prune
from pctool.checkpoint.refs import FOLDER, refer, referred, refs_of, removing
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import IncompleteError, NotFoundError
from pctool.run.layout import RunDir, checkpoint_name, write_atomic

OLDEST = checkpoint_name(0, 10)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run with four complete checkpoints of one lineage."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    parent = None
    for step in (10, 20, 30, 40):
        name = checkpoint_name(0, step)
        (run.checkpoints / name).mkdir(parents=True)
        manifest = mf.Manifest(run=str(run.path), attempt=0, step=step, parent=parent, world_size=1, files={})
        (run.checkpoints / name / mf.NAME).write_bytes(mf.encode(manifest))
        parent = name
    return run


@pytest.fixture
def other(tmp_path: Path) -> RunDir:
    (tmp_path / "other").mkdir()
    return RunDir(tmp_path / "other")


def pruned(run: RunDir, keep: int = 2) -> list[str]:
    return list(prune(run, PosixStore(run.checkpoints), 0, keep))


def test_what_another_run_refers_to_stays_until_that_run_is_gone(run: RunDir, other: RunDir) -> None:
    refer(run, OLDEST, other)
    refer(run, OLDEST, other)
    assert referred(run) == {OLDEST}
    assert pruned(run) == [checkpoint_name(0, 20)]
    shutil.rmtree(other.path)
    assert referred(run) == frozenset()
    assert pruned(run) == [OLDEST]
    assert not (run.checkpoints / FOLDER / OLDEST).exists()


def test_a_ref_says_who_and_since_when(run: RunDir, other: RunDir) -> None:
    refer(run, OLDEST, other)
    (ref,) = refs_of(run)
    assert (ref.name, ref.run, ref.counts) == (OLDEST, other.path, True)
    assert ref.time > 1e9
    (file,) = (run.checkpoints / FOLDER / OLDEST).iterdir()
    assert len(file.stem) == 16


def test_two_runs_have_a_ref_each(run: RunDir, other: RunDir, tmp_path: Path) -> None:
    third = RunDir(tmp_path / "third")
    third.path.mkdir()
    refer(run, OLDEST, other)
    refer(run, OLDEST, third)
    assert len(refs_of(run)) == 2
    shutil.rmtree(other.path)
    assert referred(run) == {OLDEST}


def test_refs_are_no_checkpoints(run: RunDir, other: RunDir) -> None:
    before = PosixStore(run.checkpoints).names()
    refer(run, OLDEST, other)
    assert PosixStore(run.checkpoints).names() == before


def test_they_hold_on_every_tier(run: RunDir, other: RunDir, tmp_path: Path) -> None:
    class Remote(PosixStore):
        tier = "s3"

    shutil.copytree(run.checkpoints, tmp_path / "remote")
    refer(run, OLDEST, other)
    assert list(prune(run, Remote(tmp_path / "remote"), 0, 2)) == [checkpoint_name(0, 20)]


def test_a_run_that_cannot_be_asked_for_counts_as_there(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "folder" / "other")
    other.path.mkdir(parents=True)
    refer(run, OLDEST, other)
    shutil.rmtree(tmp_path / "folder")
    assert referred(run) == frozenset()
    (tmp_path / "folder").symlink_to(tmp_path / "folder")  # asking gives ELOOP, which is not "none"
    assert referred(run) == {OLDEST}


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[1]", b'{"run": 5, "time": 0}', b'{"run": "/x"}', b'{"run": "a\\u0000", "time": 0}']
)
def test_a_ref_that_cannot_be_understood_counts(run: RunDir, other: RunDir, damage: bytes) -> None:
    refer(run, OLDEST, other)
    (file,) = (run.checkpoints / FOLDER / OLDEST).iterdir()
    file.write_bytes(damage)
    shutil.rmtree(other.path)
    assert referred(run) == {OLDEST}
    assert OLDEST not in pruned(run)


def test_refs_that_cannot_be_listed_stop_the_removal(run: RunDir) -> None:
    (run.checkpoints / FOLDER).write_text("a file where the folder should be")
    with pytest.raises(StoreUnreadableError, match="which runs refer"):
        pruned(run)
    assert len(PosixStore(run.checkpoints).names()) == 4


def test_only_what_is_there_and_complete_can_be_referred_to(run: RunDir, other: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        refer(run, checkpoint_name(0, 11), other)
    with pytest.raises(NotFoundError, match="no checkpoint"):
        refer(run, "../other", other)
    with pytest.raises(NotFoundError, match="run directory"):
        refer(run, OLDEST, RunDir(tmp_path / "nowhere"))
    (run.checkpoints / OLDEST / mf.NAME).unlink()
    with pytest.raises(IncompleteError, match="not complete"):
        refer(run, OLDEST, other)
    assert refs_of(run) == []


def test_who_comes_while_it_is_being_removed_is_turned_away(run: RunDir, other: RunDir) -> None:
    with removing(run, OLDEST) as may:
        assert may
        with pytest.raises(IncompleteError, match="just being removed"):
            refer(run, OLDEST, other)
        assert referred(run) == frozenset()


def test_who_refers_first_is_seen_by_the_removal(run: RunDir, other: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was made, and then the ref came."""
    monkeypatch.setattr("pctool.checkpoint.lineage.referred", lambda run: frozenset())
    refer(run, OLDEST, other)
    assert pruned(run) == [checkpoint_name(0, 20)]
    refer(run, OLDEST, other)  # nothing is announced any more


def test_a_removal_that_died_before_it_began_does_not_turn_away_for_ever(run: RunDir, other: RunDir) -> None:
    announcement = run.checkpoints / FOLDER / OLDEST / "removing"
    announcement.parent.mkdir(parents=True)
    announcement.touch()
    with pytest.raises(IncompleteError):
        refer(run, OLDEST, other)
    os.utime(announcement, (0, 0))
    refer(run, OLDEST, other)
    assert OLDEST not in pruned(run)


def test_a_removal_between_the_look_and_the_ref_is_noticed(
    run: RunDir, other: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, data: bytes) -> None:
        assert OLDEST in pruned(run)
        path.parent.mkdir()  # the removal took it along
        write_atomic(path, data)

    monkeypatch.setattr(refs, "write_atomic", late)
    with pytest.raises(NotFoundError):
        refer(run, OLDEST, other)
    assert refs_of(run) == []
