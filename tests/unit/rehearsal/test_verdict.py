from __future__ import annotations

from typing import Any

from pctool.rehearsal.verdict import find, first_difference, merge_traces, seconds_between, steps_lost
from pctool.run.ledger import Event


def line(step: int, loss: float, *samples: int) -> dict[str, Any]:
    return {"step": step, "loss": loss, "samples": list(samples)}


def test_a_step_done_again_with_the_same_result_is_no_difference() -> None:
    merged, differing = merge_traces([[line(0, 1.0, 5), line(1, 0.5, 6)], [line(1, 0.5, 6), line(2, 0.25, 7)]])
    assert sorted(merged) == [0, 1, 2]
    assert differing == []


def test_a_step_done_again_with_another_result_is_named() -> None:
    _, differing = merge_traces([[line(0, 1.0), line(1, 0.5)], [line(1, 0.75), line(2, 0.25)]])
    assert differing == [1]


def test_lines_of_one_step_are_one_record_that_a_killed_rank_may_have_begun() -> None:
    loss, samples = {"step": 3, "loss": 1.0}, {"step": 3, "samples": [5]}
    assert merge_traces([[loss, samples]]) == ({3: {"step": 3, "loss": 1.0, "samples": [5]}}, [])
    assert merge_traces([[loss], [loss, samples]])[1] == []
    assert merge_traces([[loss, samples], [loss, {"step": 3, "samples": [6]}]])[1] == [3]


def test_first_difference_names_rank_step_and_both_values() -> None:
    expected = {0: {0: line(0, 1.0, 3), 1: line(1, 0.5, 4)}}
    got = {0: {0: line(0, 1.0, 3), 1: line(1, 0.5, 9)}}
    assert first_difference(expected, got, "loss") is None
    assert first_difference(expected, got, "samples") == "rank 0 step 1: [9] instead of [4]"


def test_first_difference_sees_a_missing_an_extra_step_and_a_missing_rank() -> None:
    one, two = {0: {0: line(0, 1.0)}}, {0: {0: line(0, 1.0), 1: line(1, 1.0)}}
    assert first_difference(two, one, "loss") == "rank 0 did not log step 1"
    assert first_difference(one, two, "loss") == "rank 0 logged an extra step 1"
    assert first_difference({**one, 1: {}}, one, "loss") == "ranks [0] logged, [0, 1] in the baseline"


def test_steps_lost_counts_what_was_done_twice() -> None:
    assert steps_lost({0: 41}, {}) == 0
    assert steps_lost({0: 41, 1: 99}, {1: 42}) == 0
    assert steps_lost({0: 45, 1: 99}, {1: 40}) == 6
    assert steps_lost({0: 45, 2: 60, 3: 99}, {0: 0, 2: 40, 3: 55}) == 12


def test_an_attempt_without_a_step_hides_no_loss() -> None:
    assert steps_lost({0: 45, 2: 99}, {0: 0, 2: 40}) == 6


def event(time: float, name: str, attempt: int, **fields: Any) -> Event:
    return Event(time=time, attempt=attempt, event=name, fields=fields)


def test_seconds_between_takes_decide_or_the_kill_as_the_end() -> None:
    events = [
        event(0.0, "claim", 0),
        event(10.0, "first-step", 0, step=0),
        event(50.0, "decided", 0),
        event(120.0, "claim", 1),
        event(131.5, "first-step", 1, step=42),
    ]
    assert seconds_between(events, {}) == (70.0, 11.5)
    without = [e for e in events if e.event != "decided"]
    assert seconds_between(without, {0: 45.0}) == (75.0, 11.5)
    assert seconds_between(without, {}) == (None, 11.5)
    assert seconds_between(events[:3], {}) == (None, None)


def test_attempts_that_only_stepped_back_are_part_of_the_wait() -> None:
    events = [
        event(10.0, "first-step", 0, step=1),
        event(50.0, "decided", 0),
        event(70.0, "claim", 1),
        event(71.0, "decided", 1),
        event(90.0, "claim", 2),
        event(95.0, "first-step", 2, step=42),
    ]
    assert seconds_between(events, {}) == (40.0, 5.0)


def test_find_respects_name_attempt_and_time() -> None:
    events = [event(1.0, "claim", 0), event(5.0, "claim", 1)]
    found = find(events, "claim", attempt=1)
    assert found is not None
    assert found.time == 5.0
    assert find(events, "claim", after=6.0) is None
