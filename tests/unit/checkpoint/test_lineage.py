"""Where a run resumes, what counts as lost, and what may be removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.lineage import (
    BelowDurableError,
    Candidate,
    ResumePoint,
    check_durable,
    clear_unfinished,
    durable,
    find_resume,
    newest_attempt,
    prune,
    prune_plan,
)
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import FencedError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def save(run: RunDir, attempt: int, step: int, parent: str | None = None, *, told: bool = True) -> str:
    """Make a complete checkpoint, in the ledger too where `told`."""
    name = checkpoint_name(attempt, step)
    folder = run.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(name.encode())
    manifest = mf.Manifest(
        run="run",
        attempt=attempt,
        step=step,
        parent=parent,
        world_size=1,
        files={"data": mf.describe_file(folder / "data")},
    )
    (folder / mf.NAME).write_bytes(mf.encode(manifest))
    if told:
        Ledger(run.ledger).append("committed", attempt=attempt, name=name, step=step)
    return name


def newest(run: RunDir) -> str | None:
    point = find_resume(run, None)
    return point.name if point else None


def test_an_empty_run_starts_at_nothing(run: RunDir) -> None:
    assert find_resume(run, None) is None


def test_the_newest_is_the_greatest_attempt_then_step(run: RunDir) -> None:
    save(run, 0, 100)
    save(run, 1, 60)
    Ledger(run.ledger).append("accepted", attempt=None, step=60)
    assert newest(run) == "000001-00000060"


def test_a_late_writer_of_an_older_attempt_never_wins(run: RunDir) -> None:
    save(run, 0, 50)
    Ledger(run.ledger).append("resumed", attempt=1, name="000000-00000050", step=50)
    save(run, 1, 60, "000000-00000050")
    save(run, 0, 90, told=False)
    assert newest(run) == "000001-00000060"


def test_an_unfinished_newest_is_passed_over(run: RunDir) -> None:
    save(run, 0, 50)
    (run.checkpoints / "000000-00000100").mkdir()
    assert newest(run) == "000000-00000050"


@pytest.mark.parametrize("harm", ["truncate", "manifest-gone", "manifest-torn"])
def test_a_damaged_newest_is_an_explained_loss(run: RunDir, harm: str) -> None:
    save(run, 0, 50)
    name = save(run, 0, 100)
    folder = run.checkpoints / name
    if harm == "truncate":
        (folder / "data").write_bytes(b"")
    elif harm == "manifest-gone":
        (folder / mf.NAME).unlink()
    else:
        (folder / mf.NAME).write_bytes((folder / mf.NAME).read_bytes()[:40])
    assert newest(run) == "000000-00000050"


def test_a_vanished_newest_stops_the_run(run: RunDir) -> None:
    save(run, 0, 50)
    PosixStore(run.checkpoints).remove(save(run, 0, 100))
    with pytest.raises(BelowDurableError, match=r"000000-00000100 .*newest one there is 000000-00000050") as caught:
        find_resume(run, None)
    assert "--from 50" in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_vanished_folder_of_checkpoints_stops_the_run(run: RunDir) -> None:
    save(run, 0, 50)
    run.checkpoints.rename(run.path / "elsewhere")
    with pytest.raises(BelowDurableError, match="none is there now"):
        find_resume(run, None)


def test_what_the_owner_accepts_is_no_loss(run: RunDir) -> None:
    save(run, 0, 50)
    PosixStore(run.checkpoints).remove(save(run, 0, 100))
    Ledger(run.ledger).append("accepted", step=50)
    assert newest(run) == "000000-00000050"


def test_accepting_a_lower_step_turns_away_from_the_higher_ones_for_good(run: RunDir) -> None:
    save(run, 0, 50)
    save(run, 0, 100)
    Ledger(run.ledger).append("accepted", step=50)
    assert newest(run) == "000000-00000050"
    Ledger(run.ledger).append("resumed", attempt=1, name="000000-00000050", step=50)
    assert newest(run) == "000000-00000050"  # attempt 1 died before its first save
    save(run, 1, 70, "000000-00000050")
    assert newest(run) == "000001-00000070"
    save(run, 1, 120, "000001-00000070")
    assert newest(run) == "000001-00000120"


def test_where_all_are_damaged_the_run_does_not_start_anew(run: RunDir) -> None:
    for step in (50, 100):
        (run.checkpoints / save(run, 0, step) / "data").write_bytes(b"")
    with pytest.raises(BelowDurableError, match=r"every checkpoint is damaged: 000000-00000100 \(.*data") as caught:
        find_resume(run, None)
    assert "000000-00000050" in caught.value.what
    assert "--from 0" in str(caught.value)
    Ledger(run.ledger).append("accepted", step=0, name=None)
    assert newest(run) is None


def test_what_was_never_complete_is_no_loss(run: RunDir) -> None:
    (run.checkpoints / "000000-00000100").mkdir(parents=True)
    assert newest(run) is None


def test_what_the_ranks_rejected_everywhere_is_not_offered_again(run: RunDir) -> None:
    fifty, hundred = save(run, 0, 50), save(run, 0, 100)
    ledger = Ledger(run.ledger)
    ledger.append("rejected", attempt=1, name=hundred, step=100, tier="s3", why="flipped")
    assert newest(run) == hundred  # it is whole in the run directory, as far as anybody knows
    ledger.append("rejected", attempt=1, name=hundred, step=100, tier="posix", why="flipped")
    assert newest(run) == fifty
    ledger.append("rejected", attempt=1, name=fifty, step=50, tier="posix", why="torn")
    with pytest.raises(BelowDurableError, match=r"every checkpoint is damaged: .*posix: flipped.*posix: torn"):
        find_resume(run, None)
    ledger.append("held", attempt=1, rule="below-durable", why="")  # released: the owner may have brought it back
    assert newest(run) == hundred


@pytest.mark.parametrize("event", ["committed", "resumed"])
def test_what_was_written_again_since_is_offered_again(run: RunDir, event: str) -> None:
    name = save(run, 0, 50)
    ledger = Ledger(run.ledger)
    ledger.append("rejected", attempt=1, name=name, step=50, tier="posix", why="flipped")
    with pytest.raises(BelowDurableError):
        find_resume(run, None)
    ledger.append(event, attempt=1, name=name, step=50)
    assert newest(run) == name


def test_a_manifest_of_another_format_is_neither_damage_nor_none(run: RunDir) -> None:
    save(run, 0, 50)
    path = run.checkpoints / save(run, 0, 100) / mf.NAME
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(
        StoreUnreadableError, match=r"000000-00000100 cannot be judged: .*format 2, this pctool reads 1"
    ):
        find_resume(run, None)
    Ledger(run.ledger).append("accepted", step=50, name="000000-00000050")
    assert newest(run) == "000000-00000050"


def test_the_next_attempt_is_above_all_that_any_tier_has_seen(run: RunDir) -> None:
    assert newest_attempt(run, None) == -1
    run.attempt(1).path.mkdir(parents=True)
    assert newest_attempt(run, None) == 1
    save(run, 5, 1000)
    assert newest_attempt(run, None) == 5


def test_a_late_commit_of_an_older_attempt_holds_nobody(run: RunDir) -> None:
    """It passed the fence before the claim and published after it: it is there, and loses."""
    save(run, 0, 100)
    Ledger(run.ledger).append("resumed", attempt=1, name="000000-00000100", step=100)
    save(run, 0, 150, "000000-00000100")
    save(run, 1, 120, "000000-00000100")
    assert newest(run) == "000001-00000120"
    PosixStore(run.checkpoints).remove("000001-00000120")
    with pytest.raises(BelowDurableError, match="000001-00000120"):
        check_durable(run, Ledger(run.ledger).read(), ResumePoint(name="x", attempt=0, step=100, tier="posix"), {})


def test_what_the_owner_turned_away_from_is_not_missed_either(run: RunDir) -> None:
    save(run, 0, 50)
    Ledger(run.ledger).append("accepted", step=50, name="000000-00000050")
    save(run, 0, 100)  # of an attempt that was still at work
    assert newest(run) == "000000-00000050"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_without_rights_is_an_error_not_none(run: RunDir) -> None:
    run.checkpoints.mkdir()
    run.checkpoints.chmod(0)
    try:
        with pytest.raises(StoreUnreadableError):
            find_resume(run, None)
    finally:
        run.checkpoints.chmod(0o755)


def test_a_tier_that_cannot_be_listed_is_an_error_not_none(run: RunDir) -> None:
    run.checkpoints.write_text("a file where the folder should be")
    with pytest.raises(StoreUnreadableError):
        find_resume(run, None)


def test_highest_durable_follows_the_lineage(run: RunDir) -> None:
    ledger = Ledger(run.ledger)
    assert max(durable(ledger.read()).values(), default=None) is None
    ledger.append("committed", attempt=0, name="000000-00000050", step=50)
    ledger.append("committed", attempt=0, name="000000-00000100", step=100)
    assert max(durable(ledger.read()).values(), default=None) == 100
    ledger.append("resumed", attempt=1, name="000000-00000050", step=50)  # 100 was rejected
    assert max(durable(ledger.read()).values(), default=None) == 50
    ledger.append("mirrored", attempt=1, name="000000-00000100", step=100)  # late, of the lineage left behind
    assert max(durable(ledger.read()).values(), default=None) == 50
    ledger.append("mirrored", attempt=1, name="000001-00000060", step=60)  # its `committed` was lost in a crash
    assert max(durable(ledger.read()).values(), default=None) == 60
    ledger.append("pruned", attempt=1, name="000001-00000060")
    assert max(durable(ledger.read()).values(), default=None) == 50
    ledger.append("fresh", attempt=2)
    assert max(durable(ledger.read()).values(), default=None) is None


def candidate(attempt: int, step: int, parent: tuple[int, int] | None = None) -> Candidate:
    name = checkpoint_name(attempt, step)
    manifest = mf.Manifest(
        run="r",
        attempt=attempt,
        step=step,
        parent=checkpoint_name(*parent) if parent else None,
        world_size=1,
        files={},
    )
    verdict = mf.Verdict(ok=True, manifest=manifest)
    return Candidate(name=name, attempt=attempt, step=step, verdicts={"posix": verdict})


def test_prune_keeps_the_newest_of_the_lineage_and_never_fewer_than_two() -> None:
    chain = [candidate(0, 10), candidate(0, 20, (0, 10)), candidate(0, 30, (0, 20)), candidate(1, 40, (0, 30))]
    assert prune_plan(chain, 3) == ["000000-00000010"]
    assert prune_plan(chain, 1) == ["000000-00000010", "000000-00000020"]
    assert prune_plan(chain[:2], 1) == []
    assert prune_plan([], 1) == []


def test_prune_leaves_another_lineage_until_it_is_passed() -> None:
    other = [candidate(0, 20, (0, 10)), candidate(0, 100, (0, 20))]
    mine = [candidate(0, 10), candidate(1, 60, (0, 10)), candidate(1, 90, (1, 60))]
    assert prune_plan([*other, *mine], 2) == ["000000-00000010"]
    passed = [*mine, candidate(1, 101, (1, 90))]
    assert prune_plan([*other, *passed], 2) == [
        "000000-00000010",
        "000000-00000020",
        "000000-00000100",
        "000001-00000060",
    ]


@pytest.mark.parametrize("known", [True, False])
def test_prune_counts_on_beyond_a_damaged_parent(run: RunDir, known: bool) -> None:
    """One that is damaged does not make another lineage of those before it."""
    parent = None
    for step in (10, 20, 30, 40):
        parent = save(run, 0, step, parent)
    (run.checkpoints / checkpoint_name(0, 20) / "data").write_bytes(b"")
    run.attempt(0).path.mkdir(parents=True)
    damaged = frozenset({checkpoint_name(0, 20)} if known else ())
    assert list(prune(run, PosixStore(run.checkpoints), 0, 3, damaged=damaged)) == []
    assert list(prune(run, PosixStore(run.checkpoints), 0, 2, damaged=damaged)) == [checkpoint_name(0, 10)]


def test_prune_follows_the_ledger_where_a_parent_is_not_there() -> None:
    """The mirror copied every other one only."""
    complete = [candidate(0, 10), candidate(0, 30, (0, 20)), candidate(0, 50, (0, 40)), candidate(0, 70, (0, 60))]
    assert prune_plan(complete, 2) == []
    parents = {checkpoint_name(0, step): checkpoint_name(0, step - 10) for step in range(20, 80, 10)}
    assert prune_plan(complete, 2, parents) == [checkpoint_name(0, 10), checkpoint_name(0, 30)]
    assert prune_plan(complete, 3, parents) == [checkpoint_name(0, 10)]


def test_prune_is_fenced_before_each_removal(run: RunDir) -> None:
    parent = None
    for step in (10, 20, 30, 40):
        parent = save(run, 0, step, parent)
    run.attempt(0).path.mkdir(parents=True)
    removals = prune(run, PosixStore(run.checkpoints), 0, 2)
    assert next(removals) == "000000-00000010"
    run.attempt(1).path.mkdir()
    with pytest.raises(FencedError):
        next(removals)
    assert "000000-00000020" in PosixStore(run.checkpoints).names()


def test_only_what_older_attempts_never_finished_is_cleared(run: RunDir) -> None:
    save(run, 0, 10)
    (run.checkpoints / save(run, 0, 20) / mf.NAME).unlink()  # once complete: evidence of a loss
    for name in ("000000-00000030", "000001-00000030"):
        (run.checkpoints / name).mkdir()
    run.attempt(1).path.mkdir(parents=True)
    store = PosixStore(run.checkpoints)
    assert list(clear_unfinished(run, store, 1, Ledger(run.ledger).read())) == ["000000-00000030"]
    assert store.names() == ["000000-00000010", "000000-00000020", "000001-00000030"]


def test_the_fence_is_the_greatest_attempt(run: RunDir) -> None:
    check_fence(run, 0)
    run.attempt(0).path.mkdir(parents=True)
    check_fence(run, 0)
    run.attempt(1).path.mkdir()
    check_fence(run, 1)
    with pytest.raises(FencedError, match="attempt 1 has taken over"):
        check_fence(run, 0)
