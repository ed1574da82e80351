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
