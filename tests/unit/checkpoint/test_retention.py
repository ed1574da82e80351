"""What is kept, whatever the history: never the newest pruned, two left, and what others refer to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import Candidate, prune, prune_plan
from pctool.checkpoint.refs import refer
from pctool.checkpoint.retention import MIN_KEPT, Retention, as_retention, parse_keep_for, retention_from
from pctool.checkpoint.stores import PosixStore
from pctool.errors import UsageError
from pctool.run import env
from pctool.run.layout import RunDir, checkpoint_name

DAY = 86400.0
NOW = 1_000 * DAY


def candidate(attempt: int, step: int, parent: str | None = None, *, saved: float = 0.0) -> Candidate:
    manifest = mf.Manifest(run="r", attempt=attempt, step=step, parent=parent, world_size=1, files={}, time=saved)
    name = checkpoint_name(attempt, step)
    verdicts = {"posix": mf.Verdict(ok=True, manifest=manifest)}
    return Candidate(name=name, attempt=attempt, step=step, verdicts=verdicts)


def chain(*steps: int, days_apart: float = 1.0) -> list[Candidate]:
    """Return a lineage whose newest was saved now and each before it `days_apart` earlier."""
    made: list[Candidate] = []
    for place, step in enumerate(steps):
        saved = NOW - (len(steps) - 1 - place) * days_apart * DAY
        made.append(candidate(0, step, made[-1].name if made else None, saved=saved))
    return made


def left(complete: list[Candidate], keep: int | Retention) -> list[int]:
    doomed = prune_plan(complete, keep, now=NOW)
    return [one.step for one in complete if one.name not in doomed]


TEN = chain(*range(1000, 11000, 1000))


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Retention(), range(1000, 11000, 1000)),
        (Retention(keep=3), [8000, 9000, 10000]),
        (Retention(keep=1), [9000, 10000]),
        (Retention(keep_for_s=3.5 * DAY), [7000, 8000, 9000, 10000]),
        (Retention(keep_for_s=1.0), [9000, 10000]),
        (Retention(keep=2, keep_every=4000), [4000, 8000, 9000, 10000]),
        (Retention(keep=2, keep_for_s=2.5 * DAY, keep_every=5000), [5000, 8000, 9000, 10000]),
        (Retention(keep_every=5000), range(1000, 11000, 1000)),  # nothing says that the rest may go
    ],
)
def test_one_stays_if_any_rule_keeps_it(keep: Retention, steps: list[int]) -> None:
    assert left(TEN, keep) == list(steps)


def test_where_saves_fall_on_no_multiple_the_first_behind_it_stays() -> None:
    steps = (412, 9980, 10392, 10804, 19990, 20402, 20814, 21226)
    assert left(chain(*steps), Retention(keep=2, keep_every=10000)) == [10392, 20402, 20814, 21226]


def test_what_was_kept_for_good_stays_as_the_run_goes_on() -> None:
    """Pruned after each save, as it is: the same ones stay as if all were judged at the end."""
    keep = Retention(keep=2, keep_every=1000)
    made: list[Candidate] = []
    for step in range(412, 5000, 412):
        made.append(candidate(0, step, made[-1].name if made else None, saved=NOW))
        parents = {checkpoint_name(0, at): checkpoint_name(0, at - 412) for at in range(824, step + 1, 412)}
        doomed = prune_plan(made, keep, parents, now=NOW)
        made = [one for one in made if one.name not in doomed]
    assert [one.step for one in made] == [1236, 2060, 3296, 4120, 4532, 4944]


def test_an_age_that_is_not_known_is_no_reason_to_remove() -> None:
    unknown = [candidate(0, step, checkpoint_name(0, step - 10) if step > 10 else None) for step in (10, 20, 30, 40)]
    assert left(unknown, Retention(keep_for_s=1.0)) == [10, 20, 30, 40]


def test_one_of_another_lineage_stays_while_it_is_young() -> None:
    other = candidate(0, 25, checkpoint_name(0, 10), saved=NOW - DAY)
    mine = [candidate(1, step, checkpoint_name(1, step - 10), saved=NOW - DAY) for step in (20, 30, 40)]
    assert left([other, *mine], Retention(keep_for_s=2 * DAY)) == [25, 20, 30, 40]
    assert left([other, *mine], Retention(keep_for_s=0.5 * DAY)) == [30, 40]


rules = st.builds(
    Retention,
    keep=st.none() | st.integers(1, 5),
    keep_for_s=st.none() | st.floats(1, 10 * DAY),
    keep_every=st.none() | st.integers(1, 50),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Draw what attempts may leave: each goes on from some earlier one, loses some of its own, at any time."""
    made: list[Candidate] = []
    for attempt in range(draw(st.integers(1, 4))):
        start = draw(st.sampled_from([None, *made]))
        parent, step = (start.name, start.step) if start else (None, 0)
        for _ in range(draw(st.integers(0, 6))):
            step += draw(st.integers(1, 30))
            saved = draw(st.just(0.0) | st.floats(NOW - 20 * DAY, NOW + DAY))
            made.append(candidate(attempt, step, parent, saved=saved))
            parent = made[-1].name
    return [one for one in made if draw(st.integers(0, 9)) > 0]


@settings(max_examples=300)
@given(complete=histories(), keep=rules, data=st.data())
def test_whatever_the_history_the_newest_two_and_what_others_need_stay(
    complete: list[Candidate], keep: Retention, data: st.DataObject
) -> None:
    names = [one.name for one in complete]
    held = data.draw(st.sets(st.sampled_from(names))) if names else set()
    doomed = prune_plan(complete, keep, now=NOW, held=held)
    assert set(doomed) <= set(names)
    assert held.isdisjoint(doomed)
    if complete:
        assert max(names, key=lambda name: tuple(map(int, name.split("-")))) not in doomed
    assert len(names) - len(doomed) >= min(len(names), MIN_KEPT)
    assert not doomed or keep.keep is not None or keep.keep_for_s is not None


@given(complete=histories(), keep=rules, extra=st.integers(1, 5))
def test_another_rule_never_removes_more(complete: list[Candidate], keep: Retention, extra: int) -> None:
    if not keep.removes:
        return
    looser = Retention(keep=(keep.keep or 0) + extra, keep_for_s=keep.keep_for_s, keep_every=keep.keep_every)
    assert set(prune_plan(complete, looser, now=NOW)) <= set(prune_plan(complete, keep, now=NOW))


@settings(max_examples=40, deadline=None)
@given(steps=st.sets(st.integers(1, 99), min_size=1, max_size=8), keep=rules, data=st.data())
def test_on_a_real_folder_too(steps: set[int], keep: Retention, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temp:
        run, other = RunDir(Path(temp, "run")), RunDir(Path(temp, "other"))
        run.attempt(0).path.mkdir(parents=True)
        other.path.mkdir()
        store = PosixStore(run.checkpoints)
        parent = None
        for step in sorted(steps):
            parent = save(run, step, parent)
        held = data.draw(st.sets(st.sampled_from(store.names())))
        for name in held:
            refer(run, name, other)
        before = store.names()
        gone = list(prune(run, store, 0, keep, now=NOW))
        assert store.names() == [name for name in before if name not in gone]
        assert held.isdisjoint(gone)
        assert before[-1] not in gone
        assert len(store.names()) >= min(len(before), MIN_KEPT)


def save(run: RunDir, step: int, parent: str | None) -> str:
    """Make a complete checkpoint of attempt 0 that is a day older for each step below 99."""
    name = checkpoint_name(0, step)
    folder = run.checkpoints / name
    folder.mkdir(parents=True)
    manifest = mf.Manifest(
        run=str(run.path), attempt=0, step=step, parent=parent, world_size=1, files={}, time=NOW - (99 - step) * DAY
    )
    (folder / mf.NAME).write_bytes(mf.encode(manifest))
    return name


def test_a_bare_count_is_a_retention() -> None:
    assert as_retention(3) == Retention(keep=3)
    assert as_retention(None) == Retention()
    assert as_retention(Retention(keep_every=5)) == Retention(keep_every=5)


@given(rules)
def test_the_ledger_tells_the_mirror_what_is_kept(keep: Retention) -> None:
    assert Retention.from_fields({**keep.fields(), "name": "x"}) == keep


def test_a_ledger_of_before_says_a_count_alone() -> None:
    assert Retention.from_fields({"keep": 3}) == Retention(keep=3)
    assert Retention.from_fields({"keep": None}) == Retention()


def test_the_job_wins_over_the_script_rule_by_rule() -> None:
    environ = {env.KEEP: "3", env.KEEP_FOR: "7d"}
    found = retention_from(environ, keep=5, keep_for="1h", keep_every=100)
    assert found == Retention(keep=3, keep_for_s=7 * DAY, keep_every=100)
    assert retention_from({}) == Retention()


@pytest.mark.parametrize(
    ("environ", "given", "what"),
    [
        ({env.KEEP: "-1"}, {}, "PCTOOL_KEEP='-1' is not a whole number"),
        ({env.KEEP_EVERY: "1k"}, {}, "PCTOOL_KEEP_EVERY='1k' is not a whole number"),
        ({env.KEEP_FOR: "6m"}, {}, "PCTOOL_KEEP_FOR: '6m' is not a duration: m could be minutes or months"),
        ({}, {"keep": 0}, "keep=0"),
        ({}, {"keep_every": -1}, "keep_every=-1"),
        ({}, {"keep_for": "7"}, "keep_for: '7' is not a duration"),
    ],
)
def test_the_one_at_fault_is_named(environ: dict[str, str], given: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        retention_from(environ, **given)  # type: ignore[arg-type]
    assert what in caught.value.what


def test_an_age_is_a_duration() -> None:
    assert (parse_keep_for("7d"), parse_keep_for("12h"), parse_keep_for(None)) == (7 * DAY, DAY / 2, None)
