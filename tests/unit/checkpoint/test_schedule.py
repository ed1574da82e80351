"""When the next save is due, in steps, in seconds, and by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.checkpoint.interval import Every
from pctool.checkpoint.measured import SaveCost, SaveCosts
from pctool.checkpoint.schedule import FIRST_STEPS, MAX_GROWTH, Schedule
from pctool.checkpoint.uptime import Uptime


@dataclass
class Training:
    """Train and save by a schedule, on a clock of its own; `saves` are (step, seconds trained since the last)."""

    schedule: Schedule
    stall_s: float = 0.5
    persist_s: float = 20.0
    step: int = 0
    costs: SaveCosts = field(default_factory=SaveCosts)
    saves: list[tuple[int, float]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.schedule.clock = lambda: self.now
        self.due = self.schedule.next_due(self.step, 0.0, self.costs)

    def save_after(self, step_s: float, *, told_s: float | None = None) -> None:
        steps = self.due - self.step
        assert steps >= 1
        self.now += steps * step_s + self.stall_s
        self.step = self.due
        self.saves.append((steps, steps * step_s))
        self.costs.add(SaveCost(stall_s=self.stall_s, persist_s=self.persist_s))
        self.due = self.schedule.next_due(self.step, step_s if told_s is None else told_s, self.costs)


def schedule(every: Every, *, uptime_s: float = 7200.0, noticed: float = 0.0) -> Schedule:
    uptime = Uptime(mean_s=uptime_s, noticed=noticed, attempts=3, ends=2)
    return Schedule(every=every, uptime=lambda: uptime)


@given(every=st.integers(1, 1000), step=st.integers(0, 10**6))
def test_steps_are_the_next_multiple(every: int, step: int) -> None:
    due = schedule(Every(steps=every)).next_due(step, 1.0, SaveCosts())
    assert step < due <= step + every
    assert due % every == 0


def test_seconds_become_steps_once_steps_were_measured() -> None:
    training = Training(schedule(Every(seconds=300)))
    assert training.due == FIRST_STEPS
    for _ in range(6):
        training.save_after(0.25)
    assert [steps for steps, _ in training.saves] == [10, 40, 160, 640, 1200, 1200]
    assert training.schedule.why == "saving every 5 min 00 s (1200 steps)"


def test_what_lies_between_the_steps_is_measured_too() -> None:
    """Each step is told as 0.1 s, and with the evaluations in the loop the interval took 1 s a step."""
    training = Training(schedule(Every(seconds=100)))
    for _ in range(4):
        training.save_after(1.0, told_s=0.1)
    assert training.saves[-1] == (100, 100.0)


def test_a_step_longer_than_the_interval_is_saved_each() -> None:
    training = Training(schedule(Every(seconds=5)))
    training.save_after(60)
    training.save_after(60)
    assert training.due == training.step + 1


def test_a_stall_as_long_as_the_interval_does_not_shrink_it() -> None:
    training = Training(schedule(Every(seconds=100)), stall_s=100)
    for _ in range(5):
        training.save_after(1.0)
    assert training.saves[-1] == (100, 100.0)


def test_auto_finds_youngs_interval_and_says_why() -> None:
    training = Training(schedule(Every(auto=True)))
    assert "to measure" in training.schedule.why
    for _ in range(5):
        training.save_after(0.206)
    assert training.saves[-1][1] == pytest.approx(84.85, abs=0.2)
    assert training.schedule.why == (
        "saving every 1 min 25 s (412 steps): stall 0.5 s, persist 20.0 s, up-time 2 h 00 min from 3 attempts"
    )


def test_auto_never_saves_faster_than_a_save_is_durable() -> None:
    training = Training(schedule(Every(auto=True)), persist_s=400.0)
    for _ in range(6):
        training.save_after(1.0)
    assert training.saves[-1] == (400, 400.0)


def test_auto_learns_from_notices() -> None:
    seldom, often = (Training(schedule(Every(auto=True), noticed=noticed)) for noticed in (0.0, 0.75))
    for _ in range(6):
        seldom.save_after(0.2)
        often.save_after(0.2)
    assert often.saves[-1][1] == pytest.approx(2 * seldom.saves[-1][1], rel=0.01)


@given(
    step_s=st.floats(0.001, 20),
    slower=st.floats(1, 1000),
    seconds=st.floats(1, 3600),
    before=st.integers(0, 8),
)
def test_slower_steps_stretch_one_interval_at_most(step_s: float, slower: float, seconds: float, before: int) -> None:
    training = Training(schedule(Every(seconds=seconds)))
    for _ in range(before):
        training.save_after(step_s)
    had = training.saves[-1][0] if training.saves else None
    training.save_after(step_s * slower)
    steps, trained_s = training.saves[-1]
    assert steps <= (MAX_GROWTH * had if had is not None else FIRST_STEPS)
    assert trained_s <= max(seconds * slower, FIRST_STEPS * step_s * slower) + step_s * slower
    training.save_after(step_s * slower)
    assert training.saves[-1][1] <= max(seconds, step_s * slower) + step_s * slower / 2 + 1e-6


def test_steps_too_fast_to_be_true_cannot_put_the_next_save_hours_away() -> None:
    training = Training(schedule(Every(seconds=300)))
    training.save_after(1e-4)  # ten steps that did nothing, as behind the end of a data set
    training.save_after(2.0)
    assert training.saves[-1] == (MAX_GROWTH * FIRST_STEPS, 80.0)


def test_asked_again_at_the_same_step_it_answers_from_the_average_it_is_given() -> None:
    """After a save that failed nothing was trained, and nothing measured."""
    training = Training(schedule(Every(seconds=100)))
    for _ in range(4):
        training.save_after(1.0)
    assert training.schedule.next_due(training.step, 1.0, training.costs) == training.step + 100
    assert training.schedule.next_due(training.step, 0.0, training.costs) == training.step + FIRST_STEPS
