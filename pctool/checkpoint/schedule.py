"""At which step the next save is due.

Rank 0 alone decides, and hands the number to the others at a save's agreement, so that no step needs a collective. The
number is fixed until then: steps that become slower stretch the interval. Two things bound that. The seconds a step
takes are measured over the whole interval behind (evaluations and waits for data included), so it happens once, not
again; and an interval has at most MAX_GROWTH times the steps of the one before, so that a few steps that were too fast
to be true cannot put the next save hours away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pctool.checkpoint.interval import MIN_AUTO_S, Every, best_interval
from pctool.checkpoint.measured import SaveCosts
from pctool.checkpoint.uptime import Uptime
from pctool.units import format_duration

# Before anything is measured. An early save also shows that saving works before hours hang on it.
FIRST_STEPS = 10
MAX_GROWTH = 4


@dataclass(kw_only=True)
class Schedule:
    """When to save, for rank 0. Call `next_due` before the first step and after each save, failed ones too.

    `uptime` is asked for anew each time: it knows more with every hour. `why` tells the last answer in words.
    """

    every: Every
    uptime: Callable[[], Uptime]
    clock: Callable[[], float] = time.monotonic
    why: str = ""
    _step: int | None = field(default=None, init=False)  # where `next_due` was last asked
    _at: float = field(default=0.0, init=False)
    _ahead: int = field(default=FIRST_STEPS, init=False)

    def next_due(self, step: int, step_s: float, measured: SaveCosts) -> int:
        """Return the step after which to save next, greater than `step`, the steps done.

        `step_s` is the seconds of a step where no interval was measured yet, 0 if that is not known either.
        """
        if self.every.steps is not None:
            self.why = f"saving every {self.every.steps} steps"
            return (step // self.every.steps + 1) * self.every.steps
        step_s = self._measured_step_s(step, measured) or step_s
        limit = FIRST_STEPS if self._step is None else MAX_GROWTH * self._ahead
        self._ahead = self._steps_ahead(step_s, measured, limit)
        self._step, self._at = step, self.clock()
        return step + self._ahead

    def _steps_ahead(self, step_s: float, measured: SaveCosts, limit: int) -> int:
        interval_s, reasons = self._interval(measured)
        if interval_s is None or step_s <= 0:
            ahead = min(FIRST_STEPS, limit)
            self.why = f"saving after {ahead} steps, to measure what a step and a save take"
            return ahead
        wanted = max(1, round(interval_s / step_s))
        ahead = min(wanted, limit)
        self.why = f"saving every {format_duration(interval_s)} ({wanted} steps){reasons}"
        if ahead < wanted:
            self.why += f"; next after {ahead} steps, since the steps were measured over fewer so far"
        return ahead

    def _interval(self, measured: SaveCosts) -> tuple[float | None, str]:
        """Return the seconds of training between two saves, None if that cannot be told yet, and the reasons."""
        if self.every.seconds is not None:
            return self.every.seconds, ""
        stall_s, persist_s = measured.stall_s, measured.persist_s()
        if stall_s is None or persist_s is None:
            return None, ""
        uptime = self.uptime()
        interval_s = best_interval(
            stall_s=stall_s,
            uptime_s=uptime.mean_s,
            noticed=uptime.noticed,
            persist_s=persist_s,
            least_s=MIN_AUTO_S,
        )
        return interval_s, f": stall {format_duration(stall_s)}, persist {format_duration(persist_s)}, {uptime}"

    def _measured_step_s(self, step: int, measured: SaveCosts) -> float:
        """Return the seconds a step took since `next_due` was last asked, 0 if none was done since.

        The stall of one save lies in between, whether this is asked before it or after.
        """
        if self._step is None or step <= self._step:
            return 0.0
        trained_s = self.clock() - self._at - measured.last_stall_s
        return max(trained_s, 0.0) / (step - self._step)
