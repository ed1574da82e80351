"""How long a run's gang stays up, and how often its end is told in time: learned from the run's own ledger.

A gang's up-time ends with a loss or a notice on any of its nodes. Stops by a user or a time limit, and the end of the
run, only say that it had lasted so long. With few ends seen, an assumption counts as one more end:

- spot: 1.7 h, the lower of 1.7 and 2.0 h that gangs of 16 nodes lived where single nodes lived 1.8 to 2.6 h (computed
  from public interruption traces). Spot losses come together, so a node's figure is never divided by the nodes;
- on demand: 6.5 failures in 1,000 node-days (RSC-1, A. Kokolis et al., Revisiting reliability in large-scale machine
  learning research clusters, 2024), independent, so divided by the nodes.

Where nobody says which it is, the shorter one is taken: saving too often costs stalls, too seldom costs work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.units import format_duration

SPOT_GANG_S = 1.7 * 3600
FAILURES_PER_NODE_S = 6.5 / 1000 / 86400
ASSUMED_ENDS = 1  # how many ends the assumption is worth
_ENDS_OF_UP_TIME = frozenset({"stop-requested", "peer-lost", "node-exit", "decided"})


@dataclass(frozen=True, kw_only=True)
class Uptime:
    """What is known of the gang's up-time. `attempts` were looked at, `ends` of them ended by a loss or a notice."""

    mean_s: float
    noticed: float  # share of ends with a saved stop after a notice; below 1
    attempts: int
    ends: int

    def __str__(self) -> str:
        """Return it in words, for the log."""
        if not self.ends:
            return f"up-time {format_duration(self.mean_s)} (assumed: no loss yet in {_counted(self.attempts)})"
        told = f", {self.noticed:.0%} told in time" if self.noticed else ""
        return f"up-time {format_duration(self.mean_s)} from {_counted(self.attempts)}{told}"


def _counted(attempts: int) -> str:
    return f"{attempts} attempt{'' if attempts == 1 else 's'}"


def assumed_uptime(nodes: int, *, spot: bool | None = None) -> float:
    """Return the mean up-time in seconds of a gang of `nodes` of which nothing is known; `spot` None: the shorter."""
    on_demand = 1 / (FAILURES_PER_NODE_S * max(1, nodes))
    if spot is None:
        return min(SPOT_GANG_S, on_demand)
    return SPOT_GANG_S if spot else on_demand


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt as far as its up-time goes: seconds up, and whether that ended it (if not, it was longer)."""

    up_s: float
    ended: bool
    noticed: bool = False  # the notice came in time for a save


def mean_uptime(lives: Sequence[Life], assumed_s: float) -> Uptime:
    """Return the mean up-time over all lives, the assumption counted as ASSUMED_ENDS ends.

    Time up over ends is the estimate of greatest likelihood for an exponential up-time with lives that were cut off;
    the assumption makes it the mean of the rate's posterior (a gamma prior). The share noticed has the assumed end as
    one that nobody told, so it starts at 0 and never comes to 1.
    """
    ends = sum(life.ended for life in lives)
    told = sum(life.noticed for life in lives)
    up_s = sum(life.up_s for life in lives)
    return Uptime(
        mean_s=(ASSUMED_ENDS * assumed_s + up_s) / (ASSUMED_ENDS + ends),
        noticed=told / (ASSUMED_ENDS + ends),
        attempts=len(lives),
        ends=ends,
    )


def lives_of(events: Iterable[Event], *, before: int, heard: Mapping[int, float] = MappingProxyType({})) -> list[Life]:
    """Return the life of each attempt before `before`: they are all over.

    `heard` says when attempts were last heard of, for those whose batch node was lost with them. Attempts that stepped
    back from a node with a standing notice are left out: they end for the notice that ended the one before.
    """
    by_attempt: dict[int, list[Event]] = {}
    for event in events:
        if event.attempt is not None and event.attempt < before:
            by_attempt.setdefault(event.attempt, []).append(event)
    return [
        _life(its, heard.get(number, 0.0))
        for number, its in sorted(by_attempt.items())
        if not any(event.event == "step-back" for event in its)
    ]


def follow_uptime(
    run: RunDir, *, attempt: int, nodes: int, spot: bool | None = None, clock: Callable[[], float] = time.time
) -> Callable[[], Uptime]:
    """Return what tells the up-time of a run's gang, seen from its current `attempt` of `nodes`, when it is asked.

    What is past does not change any more, so the ledger is read once. Raises OSError where it cannot be.
    """
    events = Ledger(run.ledger).read()
    numbers = {event.attempt for event in events if event.attempt is not None}
    heard = {number: when for number in numbers if (when := _heartbeat(run, number)) is not None}
    past = lives_of(events, before=attempt, heard=heard)
    began = next((event.time for event in events if event.attempt == attempt), clock())
    assumed_s = assumed_uptime(nodes, spot=spot)
    return lambda: mean_uptime([*past, Life(up_s=max(0.0, clock() - began), ended=False)], assumed_s)


def _heartbeat(run: RunDir, attempt: int) -> float | None:
    """Return when an attempt's heartbeat was last written, None where it left none."""
    try:
        return run.attempt(attempt).heartbeat.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None


def _life(events: Sequence[Event], heard: float) -> Life:
    """Judge one attempt that is over."""
    began = events[0].time
    stopped = next((event.time for event in events if event.event in _ENDS_OF_UP_TIME), None)
    until = stopped if stopped is not None else max(heard, events[-1].time)
    asked = next((event for event in events if event.event == "stop-requested"), None)
    if asked is not None:
        ended = asked.fields.get("why") == "notice"
        return Life(up_s=max(0.0, until - began), ended=ended, noticed=ended and _saved_at_stop(events))
    return Life(up_s=max(0.0, until - began), ended=_was_lost(events))


def _saved_at_stop(events: Sequence[Event]) -> bool:
    """Return whether the step at which the ranks agreed to stop became a complete checkpoint."""
    steps = [event.fields.get("step") for event in events if event.event == "stop-step"]
    committed = {event.fields.get("step") for event in events if event.event == "committed"}
    return bool(steps) and steps[-1] in committed


def _was_lost(events: Sequence[Event]) -> bool:
    """Return whether an attempt without a stop ended unasked, with work to lose.

    A program's error counts once a step was done, whatever the cause: the work since the last checkpoint is lost just
    the same. Where the batch host left no decision its node was lost, unless Slurm's signal reached the launches.
    """
    decided = next((event for event in reversed(events) if event.event == "decided"), None)
    if decided is None:
        causes = {event.fields.get("cause") for event in events if event.event == "node-exit"}
        return causes != {"signal"}
    if decided.fields.get("cause") == "program-error":
        return any(event.event == "first-step" for event in events)
    return decided.fields.get("cause") == "peer-lost"
