"""Things to be done at a time, for a loop that asks how long it may sleep."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator

Action = Callable[[], None]


class Timers:
    """A heap of (monotonic time, action). What is no longer wanted must check that itself when it runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Run `action` once, `seconds` from now."""
        heapq.heappush(self._heap, (self._clock() + seconds, next(self._order), action))

    def next_in(self) -> float | None:
        """Return the seconds until the next action, 0 if it is late, None without one."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def due(self) -> Iterator[Action]:
        """Yield what is due, in order of time; what an action adds for now waits for the next call."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
