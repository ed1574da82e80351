"""What the last saves cost, and whether one more fits into the time that is left.

Only the last few count, since the state, the file system and its load change; and of those not the mean but a high
quantile, since a save that was predicted too short is cut off, while one outlier must not stop the next eight.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pctool.units import format_bytes

KEPT = 8  # saves that count
QUANTILE = 0.8  # of eight values the second greatest; of up to four the greatest


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one save took, on the slowest rank: seconds, and bytes over all ranks."""

    stall_s: float  # how long the training stood still: the copy, or all of it for a save in the foreground
    persist_s: float  # from the end of the stall until every byte is durable; 0 in the foreground
    commit_s: float = 0.0  # fence, manifest, ledger
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A save that is being made durable in the background: since when (seconds ago), and its bytes."""

    elapsed_s: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Whether a save fits; None where nothing is measured yet: then try. `why` says it in words."""

    fits: bool | None
    need_s: float
    left_s: float | None  # None: there is no deadline
    why: str

    @property
    def should_try(self) -> bool:
        """Return whether to begin the save."""
        return self.fits is not False


@dataclass
class SaveCosts:
    """The costs of the last saves of this attempt."""

    last: deque[SaveCost] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, cost: SaveCost) -> None:
        """Remember one complete save."""
        self.last.append(cost)

    @property
    def stall_s(self) -> float | None:
        """Return the median stall: what the interval weighs is the usual cost, not the worst."""
        return statistics.median(cost.stall_s for cost in self.last) if self.last else None

    @property
    def last_stall_s(self) -> float:
        """Return the stall of the last save, 0 before the first."""
        return self.last[-1].stall_s if self.last else 0.0

    def persist_s(self, size: int = 0) -> float | None:
        """Return how long a save of `size` bytes (0: as many as last time) takes in the background, commit included.

        Seconds a byte where bytes were measured, else the seconds as they were.
        """
        if not self.last:
            return None
        size = size or self.last[-1].bytes
        if size and all(cost.bytes for cost in self.last):
            moved_s = size * high(cost.persist_s / cost.bytes for cost in self.last)
        else:
            moved_s = high(cost.persist_s for cost in self.last)
        return moved_s + high(cost.commit_s for cost in self.last)

    def rest_s(self, save: InFlight | None) -> float:
        """Return how long a save in flight still takes; one that is late may take as long again as it is late."""
        if save is None:
            return 0.0
        expected = self.persist_s(save.bytes)
        if expected is None:
            return save.elapsed_s  # the first save: as likely halfway as anywhere
        return abs(expected - save.elapsed_s)

    def final_s(self, *, size: int = 0, in_flight: InFlight | None = None) -> float | None:
        """Return the seconds from the agreed step until a save begun there is complete; None before the first.

        The rest of the one in flight comes first, since both share buffers and the file system.
        """
        persist_s = self.persist_s(size)
        if persist_s is None:
            return None
        return self.rest_s(in_flight) + self._stall_for(size) + persist_s

    def predict(
        self, *, left_s: float | None, steps_s: float = 0.0, size: int = 0, in_flight: InFlight | None = None
    ) -> Prediction:
        """Predict whether a save after `steps_s` more of training is complete within `left_s` (None: no deadline).

        It fits if steps + the rest of the save in flight + copy + bytes / bandwidth + commit are not more than is left.
        """
        save_s = self.final_s(size=size, in_flight=in_flight)
        if save_s is None:
            rest_s = steps_s + self.rest_s(in_flight)
            return Prediction(fits=None, need_s=rest_s, left_s=left_s, why="unknown: no save was measured yet, so try")
        need_s = steps_s + save_s
        shown = f"needs {need_s:.1f} s" + (f" for {format_bytes(size)}" if size else "")
        room = "there is no deadline" if left_s is None else f"{left_s:.1f} s are left"
        fits = left_s is None or need_s <= left_s
        return Prediction(fits=fits, need_s=need_s, left_s=left_s, why=f"{shown}, {room}")

    def _stall_for(self, size: int) -> float:
        last = self.last[-1].bytes
        growth = size / last if size and last else 1.0
        return high(cost.stall_s for cost in self.last) * max(1.0, growth)


def high(values: Iterable[float]) -> float:
    """Return the value that QUANTILE of them do not exceed (nearest rank). Raises ValueError for none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1]
