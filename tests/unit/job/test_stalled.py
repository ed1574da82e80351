"""Counting attempts that bring no new checkpoint."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pctool.job.stalled import MAX_STEP_BACKS, SURELY_WORKED_S, Stall, count_stalled, why_stalled
from pctool.run.ledger import Event


def event(attempt: int | None, what: str, /, **fields: Any) -> Event:
    return Event(time=0.0, attempt=attempt, event=what, fields=fields)


def claims(*numbers: int) -> list[Event]:
    return [event(number, "claim") for number in numbers]


def test_a_new_run_is_not_stalled() -> None:
    assert count_stalled([]) == Stall(stalled=0, step_backs=0)


def test_attempts_without_a_checkpoint_count_until_one_has_one() -> None:
    events = [*claims(0), event(0, "committed", step=10), *claims(1, 2)]
    assert count_stalled(events).stalled == 2
    assert count_stalled([*events, event(2, "committed", step=20)]).stalled == 0


def test_saving_again_what_was_restored_is_no_progress() -> None:
    events = [*claims(1), event(1, "resumed", step=10), event(1, "committed", step=10)]
    assert count_stalled(events).stalled == 1
    assert count_stalled([*events, event(1, "committed", step=11)]).stalled == 0


def test_mirroring_what_a_dead_attempt_left_is_no_progress() -> None:
    events = [*claims(1), event(1, "mirrored", name="000000-00000010", step=10)]
    assert count_stalled(events).stalled == 1
    assert count_stalled([*events, event(1, "mirrored", name="000001-00000020", step=20)]).stalled == 0


def test_step_backs_are_counted_apart() -> None:
    events = [*claims(0), event(0, "committed", step=1), *claims(1, 2, 3), event(1, "step-back"), event(3, "step-back")]
    assert count_stalled(events) == Stall(stalled=1, step_backs=2)


def test_a_hold_or_an_acceptance_starts_anew() -> None:
    assert count_stalled([*claims(0, 1, 2), event(2, "held"), *claims(3)], [0, 1, 2, 3]).stalled == 1
    assert count_stalled([*claims(0, 1, 2), event(None, "accepted", step=0)], [0, 1, 2]).stalled == 0


def test_a_folder_that_the_ledger_does_not_know_counts() -> None:
    assert count_stalled(claims(0), [0, 1]).stalled == 2


def test_a_finished_run_is_not_stalled() -> None:
    assert count_stalled([*claims(0), event(0, "decided", cause="done")]).stalled == 0


def test_the_reasons() -> None:
    assert why_stalled(Stall(stalled=2, step_backs=0), 3) is None
    assert "3 attempts in a row" in (why_stalled(Stall(stalled=3, step_backs=0), 3) or "")
    assert why_stalled(Stall(stalled=0, step_backs=MAX_STEP_BACKS - 1), 3) is None
    assert "standing notice" in (why_stalled(Stall(stalled=0, step_backs=MAX_STEP_BACKS), 3) or "")


NAMES = st.sampled_from(["claim", "step-back", "held", "resumed", "committed", "notice"])


@given(st.lists(st.tuples(st.integers(0, 5), NAMES)))
def test_a_hold_at_the_end_always_resets(history: list[tuple[int, str]]) -> None:
    events = [event(number, name, step=1) for number, name in history]
    assert count_stalled([*events, event(5, "held")]) == Stall(stalled=0, step_backs=0)


def at(seconds: float, attempt: int | None, what: str, /, **fields: Any) -> Event:
    return Event(time=seconds, attempt=attempt, event=what, fields=fields)


def lost_after(attempt: int, seconds: float, *more: Event) -> list[Event]:
    """Return the events of an attempt that ran for so long and then lost a node."""
    begun = attempt * 1_000_000.0
    started = at(begun + 60, attempt, "started", nodes=["a"], seconds=60)
    ended = at(begun + 60 + seconds, attempt, "decided", cause="peer-lost", saved=False)
    return [at(begun, attempt, "claim"), started, *more, ended]


def test_a_script_that_saves_by_itself_stalls_only_where_it_ends_soon() -> None:
    """Nothing tells of its checkpoints, so a loss after days is no sign that it makes none."""
    days = [event for attempt in range(3) for event in lost_after(attempt, 5 * 86400)]
    assert count_stalled(days).stalled == 0
    soon = [event for attempt in range(3) for event in lost_after(attempt, SURELY_WORKED_S - 1)]
    assert count_stalled(soon).stalled == 3
    assert count_stalled([*lost_after(0, 60), *lost_after(1, 5 * 86400), *lost_after(2, 60)]).stalled == 1


def test_a_script_of_ours_that_ran_for_days_without_a_checkpoint_is_stalled() -> None:
    days = [event for attempt in range(3) for event in lost_after(attempt, 5 * 86400, at(0, attempt, "fresh"))]
    assert count_stalled(days).stalled == 3


def test_the_heartbeat_tells_how_long_an_attempt_ran_whose_batch_node_was_lost() -> None:
    events = [at(0, 0, "claim"), at(60, 0, "started")]
    assert count_stalled(events, [0]).stalled == 1
    assert count_stalled(events, [0], heard={0: 60 + SURELY_WORKED_S}).stalled == 0
    assert count_stalled(events, [0], heard={0: 61}).stalled == 1
    # one that never started worked on nothing, however long its nodes took to boot
    assert count_stalled([at(0, 0, "claim")], [0], heard={0: 9e9}).stalled == 1


def test_a_script_that_saves_by_itself_makes_progress_by_following_a_stop() -> None:
    stopped = event(0, "decided", cause="stop", saved=True)
    assert count_stalled([*claims(0), stopped]).stalled == 0
    assert count_stalled([*claims(0), event(0, "decided", cause="stop", saved=False)]).stalled == 1
    assert count_stalled([*claims(0), event(0, "fresh"), stopped]).stalled == 1  # ours would have a checkpoint
