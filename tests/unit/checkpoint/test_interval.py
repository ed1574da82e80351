"""What may be said of how often to save, and the interval that loses least, against a simulation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.checkpoint.interval import Every, best_interval, every_from, parse_every, waste
from pctool.errors import UsageError
from pctool.run import env

HOUR = 3600.0


@pytest.mark.parametrize(
    ("value", "every"),
    [
        (None, None),
        (100, Every(steps=100)),
        ("100", Every(steps=100)),
        ("90s", Every(seconds=90)),
        ("10min", Every(seconds=600)),
        ("1h", Every(seconds=3600)),
        ("1h 30min", Every(seconds=5400)),
        ("1.5 h", Every(seconds=5400)),
        ("auto", Every(auto=True)),
        (" Auto ", Every(auto=True)),
    ],
)
def test_steps_times_and_auto_are_told_apart(value: int | str | None, every: Every | None) -> None:
    assert parse_every(value) == every


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    [
        (0, "checkpoint.every is 0", "at least 1"),
        ("-5", "checkpoint.every is -5", "at least 1"),
        ("atuo", "checkpoint.every: 'atuo' is not a duration", 'did you mean "auto"?'),
        ("10m", "m could be minutes or months", "10min"),
        ("1.5", "'1.5' is not a duration", "10min"),
        ("10 steps", "'10 steps' is not a duration", "number of steps as in 100"),
        ("-90s", "'-90s' is not a duration", "10min"),
        ("0s", "'0s' is too short", "10min"),
        ("", "'' is not a duration", "auto"),
        ("00:10:00", "is not a duration", "10min"),
    ],
)
def test_what_is_neither_is_refused_with_the_way_to_write_it(value: int | str, what: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_every(value)
    assert what in caught.value.what
    assert fix in (caught.value.fix or "")


milliseconds = st.integers(1, 10**12)
everies = (
    st.builds(Every, steps=st.integers(1))
    | st.builds(Every, seconds=milliseconds.map(lambda count: count / 1e3))
    | st.just(Every(auto=True))
)


@given(everies)
def test_what_is_written_reads_back(every: Every) -> None:
    assert parse_every(str(every)) == every


@given(st.text(max_size=12))
def test_any_text_is_understood_or_a_usage_error(text: str) -> None:
    try:
        every = parse_every(text)
    except UsageError:
        return
    assert every is not None
    assert [every.steps is not None, every.seconds is not None, every.auto].count(True) == 1


def test_the_job_wins_over_the_script_and_the_one_at_fault_is_named() -> None:
    assert every_from({env.EVERY: "10min"}, 50) == Every(seconds=600)
    assert every_from({}, 50) == Every(steps=50)
    assert every_from({env.EVERY: ""}, None) is None
    with pytest.raises(UsageError, match=env.EVERY):
        every_from({env.EVERY: "x"}, 50)
    with pytest.raises(UsageError, match=r"every of Run\(\.\.\.\) is 0"):
        every_from({}, 0)


def test_the_worked_example() -> None:
    """Up-time 2 h, stall 0.5 s, restart 5 min, and 10 s until a checkpoint is durable."""
    assert best_interval(stall_s=0.5, uptime_s=2 * HOUR) == pytest.approx(84.85, abs=0.01)
    at_best = waste(85, stall_s=0.5, uptime_s=2 * HOUR, restart_s=300, lag_s=10)
    at_ten_minutes = waste(600, stall_s=0.5, uptime_s=2 * HOUR, restart_s=300, lag_s=10)
    assert (round(at_best, 3), round(at_ten_minutes, 3)) == (0.053, 0.082)


def test_notices_stretch_the_interval_and_a_slow_persist_bounds_it() -> None:
    assert best_interval(stall_s=0.5, uptime_s=7200, noticed=0.75) == pytest.approx(2 * 84.85, abs=0.02)
    assert best_interval(stall_s=0.5, uptime_s=7200, persist_s=120) == 120
    assert best_interval(stall_s=0.001, uptime_s=7200, least_s=10) == 10


@given(
    stall_s=st.floats(0.05, 20),
    uptime_s=st.floats(1 * HOUR, 200 * HOUR),
    noticed=st.floats(0, 0.9),
    factor=st.floats(0.2, 5),
)
def test_no_other_interval_wastes_notably_less(stall_s: float, uptime_s: float, noticed: float, factor: float) -> None:
    best = best_interval(stall_s=stall_s, uptime_s=uptime_s, noticed=noticed)

    def wasted(interval_s: float) -> float:
        return waste(interval_s, stall_s=stall_s, uptime_s=uptime_s, restart_s=300, noticed=noticed, lag_s=10)

    # the formula is of first order in stall / interval
    assert wasted(best) <= wasted(best * factor) + 2 * (stall_s / best) ** 2


def simulated(interval_s: float, *, stall_s: float, uptime_s: float, noticed: float, seed: int) -> float:
    """Return the wasted share of 30,000 lives of a gang, each with exponential up-time and then a restart of 300 s.

    A checkpoint counts once it has been durable: 10 s after its stall. A notice loses 20 s of work.
    """
    draw = random.Random(seed)
    kept = wall = 0.0
    for _ in range(30_000):
        up = draw.expovariate(1 / uptime_s)
        wall += up + 300
        whole, part = divmod(up, interval_s + stall_s)
        if draw.random() < noticed:
            kept += max(0.0, whole * interval_s + min(part, interval_s) - 20)
        else:
            behind = (10 - part) / (interval_s + stall_s)  # saves whose bytes were still on their way
            kept += max(0.0, whole - max(0, int(behind) + 1 if behind > 0 else 0)) * interval_s
    return 1 - kept / wall


@pytest.mark.parametrize("uptime_s", [2 * HOUR, 12 * HOUR])
@pytest.mark.parametrize("noticed", [0.0, 0.6])
@pytest.mark.parametrize(("share", "stall_s"), [(1 / 12, 0.5), (1 / 30, 5), (1 / 85, 2)])
def test_the_model_agrees_with_a_simulation_within_half_a_point(
    uptime_s: float, noticed: float, share: float, stall_s: float
) -> None:
    told = waste(
        uptime_s * share,
        stall_s=stall_s,
        uptime_s=uptime_s,
        restart_s=300,
        noticed=noticed,
        lag_s=10,
        lost_when_noticed_s=20,
    )
    seen = simulated(uptime_s * share, stall_s=stall_s, uptime_s=uptime_s, noticed=noticed, seed=7)
    assert told == pytest.approx(seen, abs=0.005)
