"""The bound on bytes a second, on a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.aws.pace import Pace


class Clock:
    """A clock that only sleeping turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@given(
    sizes=st.lists(st.integers(1, 1 << 25), min_size=2, max_size=40),
    rate=st.floats(1e5, 1e9),
    idle=st.floats(0, 100),
)
def test_no_stretch_of_parts_is_faster_than_the_rate(sizes: list[int], rate: float, idle: float) -> None:
    clock = Clock()
    pace, sent = Pace(rate, clock=clock, sleep=clock.sleep), []
    for at, size in enumerate(sizes):
        if at == len(sizes) // 2:
            clock.now += idle  # what was not used then is not made up for
        pace.take(size)
        sent.append((clock.now, size))
    for first in range(len(sent)):
        for last in range(first + 1, len(sent)):
            took = sent[last][0] - sent[first][0]
            assert sum(size for _, size in sent[first:last]) <= rate * took * (1 + 1e-6) + 1


def test_unbounded_and_lifted_wait_for_nothing() -> None:
    def never(_: float) -> None:
        pytest.fail("nothing is to be waited for")

    pace = Pace(None, sleep=never)
    pace.take(1 << 40)
    pace = Pace(1.0, clock=lambda: 0.0, sleep=never)
    pace.take(1 << 40)  # the first is let pass
    pace.lift()
    pace.take(1 << 40)
