"""Whether a save fits, from what the last ones cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.checkpoint.measured import KEPT, InFlight, SaveCost, SaveCosts, high

GIB = 1 << 30


def costs(*persists: float, stall_s: float = 1.0, commit_s: float = 0.5, size: int = 0) -> SaveCosts:
    made = SaveCosts()
    for persist_s in persists:
        made.add(SaveCost(stall_s=stall_s, persist_s=persist_s, commit_s=commit_s, bytes=size))
    return made


def test_before_the_first_save_it_is_unknown() -> None:
    assert SaveCosts().final_s(in_flight=InFlight(elapsed_s=30)) is None
    assert SaveCosts().stall_s is None


def test_copy_bytes_and_commit_are_summed() -> None:
    """1 s copy, 10 GiB at 1 GiB/s, 0.5 s commit."""
    assert costs(10.0, size=10 * GIB).final_s(size=10 * GIB) == pytest.approx(11.5)


def test_more_bytes_take_longer() -> None:
    made = costs(10.0, size=10 * GIB)
    assert made.final_s(size=20 * GIB) == pytest.approx(2 + 20 + 0.5)
    assert made.final_s() == pytest.approx(11.5)


def test_the_rest_of_a_save_in_flight_comes_first() -> None:
    made = costs(20.0)
    assert made.rest_s(None) == 0
    assert made.rest_s(InFlight(elapsed_s=15)) == pytest.approx(5.5)
    assert made.final_s(in_flight=InFlight(elapsed_s=15)) == pytest.approx(5.5 + 1 + 20.5)


def test_one_in_flight_that_is_late_may_take_as_long_again() -> None:
    assert costs(20.0).rest_s(InFlight(elapsed_s=30.5)) == pytest.approx(10)


def test_one_outlier_in_eight_is_forgiven_and_two_are_not() -> None:
    assert costs(*[10.0] * 7, 90.0).persist_s() == pytest.approx(10.5)
    assert costs(*[10.0] * 6, 90.0, 90.0).persist_s() == pytest.approx(90.5)
    assert costs(10.0, 90.0, 10.0).persist_s() == pytest.approx(90.5)  # of three that is no outlier yet


def test_only_the_last_few_count_and_the_usual_stall_is_the_median() -> None:
    made = costs(*[500.0] * 5, *[10.0] * KEPT)
    assert made.persist_s() == pytest.approx(10.5)
    made = SaveCosts()
    for stall_s in (0.5, 30.0, 0.6):
        made.add(SaveCost(stall_s=stall_s, persist_s=1))
    assert (made.stall_s, made.last_stall_s) == (0.6, 0.6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_a_high_quantile_is_one_of_the_values_and_most_are_not_above(values: list[float]) -> None:
    chosen = high(values)
    assert chosen in values
    assert sum(value <= chosen for value in values) >= 0.8 * len(values)
