"""How the ranks agree on the step to stop at.

Every launch sets its ranks' flag first; only then may the leading rank publish. So a rank that comes to a step boundary
after the target was published has its flag set and finds the target. The target lies a few steps ahead, since ranks
may be ahead of the leader: on a GPU the host runs ahead of the device. Every rank answers when it has reached the
target; one that was past it answers with its own step and waits there. The leader, once it has all answers, publishes
the greatest as the final step, so that the target moves at most once.

Nobody waits before the target: up to there others may need this rank in a collective. Behind the target waiting is
safe, since a waiting rank has done its part of every step up to its own, and nobody is asked to go further than that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

AHEAD = 2  # one step for the rank that looked just before the target was there, one for the way to the store
LONG_STEP_S = 5.0  # steps this long give the store time enough, and a notice leaves no time to waste
DEFAULT_LIMIT_S = 600.0  # where the stop has no deadline: a rank that does not answer for this long is lost
GRACE_S = 5.0  # the leader's decision, made at the deadline, must still reach the others


class KeyValue(Protocol):
    """What is needed of torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it up to the store's own time-out."""

    def check(self, keys: list[str], /) -> bool:
        """Return at once whether all keys are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for keys; raise RuntimeError when the time is over."""


class StopFlags(Protocol):
    """What is needed of the page."""

    @property
    def stop_requested(self) -> bool:
        """Return whether this rank's flag is set."""

    @property
    def may_publish(self) -> bool:
        """Return whether every rank's flag is set."""

    @property
    def deadline(self) -> float:
        """Return the deadline in seconds since the epoch, 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Stop after step `step`; save there unless `save` is False, in which case `why` says why not."""

    step: int
    save: bool = True
    why: str = ""
    predicted_s: float = 0.0
    left_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the leader knows: seconds a step and a save take; save_s is None before the first save."""

    step_s: float
    save_s: float | None


class StopAgreement:
    """One rank's part in the agreement. `at_boundary` is called after each step once the flag is set."""

    def __init__(
        self,
        *,
        store: KeyValue | None,
        flags: StopFlags,
        rank: int,
        world: int,
        until: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.flags = flags
        self.rank = rank
        self.world = world
        self.until = until
        self.clock = clock
        self.target: int | None = None
        self.final: Decision | None = None

    def at_boundary(self, step: int, costs: Costs) -> Decision | None:
        """Return the decision once `step` is the step to stop after, None to go on with the next step.

        Waits only at or behind the target, at most until the deadline.
        """
        if self.store is None:
            return self._alone(step, costs)
        if self.target is None:
            self.target = self._publish(step, costs) if self.rank == 0 else self._look(self.store)
        if self.target is None or step < self.target:
            return None
        if self.final is None:
            self.final = self._settle(self.store, step, costs)
        # one that could not be agreed ends here: the others cannot be counted on for another step
        return self.final if step >= self.final.step or not self.final.save else None

    def at_end(self) -> None:
        """Answer for a rank that has done the last step of the run: whatever the target is, it saves there."""
        if self.store is not None:
            self.store.set(f"ack/{self.rank}", str(self.until))

    def _alone(self, step: int, costs: Costs) -> Decision | None:
        return self._fit(step, step, costs) if self.flags.may_publish else None

    def _publish(self, step: int, costs: Costs) -> int | None:
        target = step + (1 if costs.step_s > LONG_STEP_S else AHEAD)
        # the last steps of a run need no agreement: all ranks save at its end
        if not self.flags.may_publish or target >= self.until or self.store is None:
            return None
        self.store.set("target", str(target))
        return target

    def _look(self, store: KeyValue) -> int | None:
        return int(store.get("target")) if store.check(["target"]) else None

    def _settle(self, store: KeyValue, step: int, costs: Costs) -> Decision:
        store.set(f"ack/{self.rank}", str(step))
        if self.rank == 0:
            decision = self._gather(store, step, costs)
            store.set("final", json.dumps(asdict(decision)))
            return decision
        if not wait(store, ["final"], self._limit(costs) + GRACE_S):
            return Decision(step=step, save=False, why="the leading rank did not say where to stop in time")
        return Decision(**json.loads(store.get("final")))

    def _gather(self, store: KeyValue, step: int, costs: Costs) -> Decision:
        keys = [f"ack/{rank}" for rank in range(self.world)]
        if not wait(store, keys, self._limit(costs)):
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            return Decision(step=step, save=False, why=f"no answer in time from {_ranks(silent)}")
        final = max(int(store.get(key)) for key in keys)
        if final >= self.until:
            return Decision(step=final)
        return self._fit(step, final, costs)

    def _fit(self, step: int, final: int, costs: Costs) -> Decision:
        """Decide whether the save fits. Before the first save nothing is measured, so it is tried."""
        need = (final - step) * costs.step_s + (costs.save_s or 0.0)
        left = self.flags.deadline - self.clock()
        if self.flags.deadline and costs.save_s is not None and need > left:
            why = f"needs {need:.1f} s, {left:.1f} s are left"
            return Decision(step=final, save=False, why=why, predicted_s=round(need, 3), left_s=round(left, 3))
        return Decision(step=final, predicted_s=round(need, 3), left_s=round(left, 3) if self.flags.deadline else 0.0)

    def _limit(self, costs: Costs) -> float:
        if not self.flags.deadline:
            return max(DEFAULT_LIMIT_S, 4 * costs.step_s)
        # a deadline that has passed with the node still alive is no reason not to try
        return max(self.flags.deadline - self.clock(), 2 * costs.step_s, GRACE_S)


def wait(store: KeyValue, keys: list[str], seconds: float) -> bool:
    """Wait for keys and return whether they came in time. Raise RuntimeError if the store itself is gone."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        return store.check(keys)
    return True


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
