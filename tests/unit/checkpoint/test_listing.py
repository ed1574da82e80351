"""What is told of a run's checkpoints, and what is removed on request. No data is read for either."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import tidy
from pctool.checkpoint.lineage import BelowDurableError
from pctool.checkpoint.listing import Row, as_json, list_checkpoints
from pctool.checkpoint.mark import under_way
from pctool.checkpoint.refs import refer
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.stores import StoreUnreadableError
from pctool.checkpoint.target import Target, resolve
from pctool.errors import FencedError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger


def save(run: RunDir, step: int, *, attempt: int = 0, parent: str | None = None) -> str:
    """Make a small complete checkpoint."""
    name = checkpoint_name(attempt, step)
    folder = run.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(name.encode())
    entries = {"a": mf.describe_file(folder / "a")}
    manifest = mf.Manifest(run=str(run.path), attempt=attempt, step=step, parent=parent, world_size=4, files=entries)
    (folder / mf.NAME).write_bytes(mf.encode(manifest))
    Ledger(run.ledger).append("committed", attempt=attempt, name=name, step=step, parent=parent)
    return name


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run with four checkpoints in one line."""
    made = RunDir(tmp_path / "gpt")
    made.attempt(0).path.mkdir(parents=True)
    parent = None
    for step in (10, 20, 30, 40):
        parent = save(made, step, parent=parent)
    return made


def target_of(run: RunDir) -> Target:
    return resolve(str(run.path), store=None)


def rows_of(run: RunDir) -> dict[int, Row]:
    return {row.step: row for row in list_checkpoints(target_of(run)).rows}


def removed_by(run: RunDir, keep: int) -> list[int]:
    return [int(one.name[-2:]) for one in tidy.plan(target_of(run), Retention(keep=keep)).removals]


def test_all_are_shown_newest_first_with_what_is_wrong(run: RunDir) -> None:
    (run.checkpoints / checkpoint_name(0, 50)).mkdir()
    (run.checkpoints / checkpoint_name(0, 20) / "a").write_bytes(b"?")
    Ledger(run.ledger).append("rejected", attempt=0, name=checkpoint_name(0, 40), step=40, tier="posix", why="a: CRC")
    rows = rows_of(run)
    assert list(rows) == [50, 40, 30, 20, 10]
    assert rows[50].notes == ("posix: no MANIFEST: it was never finished",)
    assert rows[40].notes == ("posix: the ranks found it damaged: a: CRC",)
    assert rows[20].notes == ("posix: a: 1 bytes where the manifest says 15",)
    assert [step for step, row in rows.items() if row.resume] == [30]


def test_manifests_exchanged_between_steps_pass_for_none(run: RunDir) -> None:
    one, other = (run.checkpoints / checkpoint_name(0, step) / mf.NAME for step in (30, 40))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    rows = rows_of(run)
    assert rows[40].notes[-1] == f"posix: MANIFEST: it is that of checkpoint {checkpoint_name(0, 30)}"
    assert [step for step, row in rows.items() if row.tiers] == [20, 10]


def test_what_the_owner_turned_away_from_is_marked(run: RunDir) -> None:
    Ledger(run.ledger).append("accepted", step=20, name=checkpoint_name(0, 20), run=str(run.path), newest=0)
    rows = rows_of(run)
    assert [step for step, row in rows.items() if row.turned_away] == [40, 30]
    assert rows[20].resume


def test_a_run_that_would_be_held_is_listed_all_the_same(run: RunDir) -> None:
    for step in (30, 40):
        (run.checkpoints / checkpoint_name(0, step) / mf.NAME).unlink()
        (run.checkpoints / checkpoint_name(0, step)).rename(run.path / f"away-{step}")
    listing = list_checkpoints(target_of(run))
    assert [row.step for row in listing.rows] == [20, 10]
    assert listing.resume is None
    assert "step 40" in (listing.held or "")
    with pytest.raises(BelowDurableError):  # what would be removed may be all there is
        removed_by(run, 2)


def test_a_run_without_any_is_empty_and_a_folder_that_cannot_be_read_is_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    run.path.mkdir()
    Ledger(run.ledger).append("submitted", job_id="7")
    assert list_checkpoints(target_of(run)).rows == ()
    run.checkpoints.write_text("a file system that was mounted wrong")
    with pytest.raises(StoreUnreadableError, match="cannot be read"):
        list_checkpoints(target_of(run))


def test_the_json_says_all_that_the_table_says(run: RunDir) -> None:
    target = target_of(run)
    found = as_json(target, list_checkpoints(target), now=5.0)
    assert (found["run"], found["store"], found["resume"], found["held"]) == (
        str(run.path),
        None,
        checkpoint_name(0, 40),
        None,
    )
    newest = found["checkpoints"][0]
    assert (newest["complete"], newest["where"], newest["files"], newest["world_size"], newest["parent"]) == (
        True,
        ["posix"],
        2,
        4,
        checkpoint_name(0, 30),
    )
    assert (newest["age_s"], newest["resume"], newest["tiers"]["posix"]["complete"]) == (5.0, True, True)


@pytest.mark.parametrize(("keep", "removed"), [(1, [10, 20]), (2, [10, 20]), (3, [10]), (4, []), (9, [])])
def test_never_fewer_than_two_stay(run: RunDir, keep: int, removed: list[int]) -> None:
    assert removed_by(run, keep) == removed


def test_only_complete_ones_count_and_no_other_is_removed(run: RunDir) -> None:
    (run.checkpoints / checkpoint_name(0, 50)).mkdir()
    (run.checkpoints / checkpoint_name(0, 30) / "a").write_bytes(b"?")
    assert removed_by(run, 2) == [10]


def test_the_lineage_is_that_of_the_one_the_owner_chose(run: RunDir) -> None:
    Ledger(run.ledger).append("accepted", step=20, name=checkpoint_name(0, 20), run=str(run.path), newest=0)
    assert removed_by(run, 2) == []  # by their names 30 and 40 would be the ones to keep
    save(run, 25, attempt=1, parent=checkpoint_name(0, 20))
    assert removed_by(run, 2) == [10]


def test_what_was_planned_is_removed_and_told(run: RunDir) -> None:
    target = target_of(run)
    plan = tidy.plan(target, Retention(keep=2))
    assert plan.bytes == sum(row.copies["posix"].bytes for step, row in rows_of(run).items() if step < 30)
    assert [int(one.name[-2:]) for one in tidy.remove(target, plan, 0)] == [10, 20]
    assert list(rows_of(run)) == [40, 30]
    assert [event.fields["name"][-2:] for event in Ledger(run.ledger).read() if event.event == "pruned"] == ["10", "20"]


def test_what_is_under_way_to_s3_stays(run: RunDir) -> None:
    target = target_of(run)
    plan = tidy.plan(target, Retention(keep=2))
    with under_way(run, 0, checkpoint_name(0, 10)):
        assert [int(one.name[-2:]) for one in tidy.remove(target, plan, 0)] == [20]
    assert list(rows_of(run)) == [40, 30, 10]


def test_what_another_run_refers_to_stays_also_if_it_comes_to_refer_meanwhile(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    refer(run, checkpoint_name(0, 10), other)
    target = target_of(run)
    plan = tidy.plan(target, Retention(keep=2))
    assert [int(one.name[-2:]) for one in plan.removals] == [20]
    refer(run, checkpoint_name(0, 20), other)
    assert list(tidy.remove(target, plan, 0)) == []
    assert list(rows_of(run)) == [40, 30, 20, 10]


def test_an_attempt_that_starts_meanwhile_ends_it(run: RunDir) -> None:
    target = target_of(run)
    removals = tidy.remove(target, tidy.plan(target, Retention(keep=2)), 0)
    next(removals)
    run.attempt(1).path.mkdir()
    with pytest.raises(FencedError):
        next(removals)
    assert list(rows_of(run)) == [40, 30, 20]
