"""How many attempts in a row brought no new complete checkpoint, counted from the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pctool.run.layout import parse_checkpoint_name
from pctool.run.ledger import Event

# An attempt that steps back from a doomed node ends at once and did nothing wrong, but a node that never goes away
# must not cycle for ever. With the requeue delay of 71 s that ParallelCluster ships, 20 of them are some 25 minutes,
# more than the two minutes that a noticed node has left, plus SlurmdTimeout and clustermgtd's minute.
MAX_STEP_BACKS = 20
# The ledger does not have the checkpoints of a script that saves by itself. What holds it up before it could save one,
# a start that fails or a first collective that nobody joins, is over after torch's longest default time-out (30 min,
# gloo) and the imports before it. An attempt that ran for longer is taken to have saved something.
SURELY_WORKED_S = 2700.0


@dataclass
class _Attempt:
    resumed: int = -1
    progress: bool = False
    ours: bool = False  # the script uses pctool.train, so its checkpoints are in the ledger
    step_back: bool = False
    started: float | None = None  # when every launch was there
    last: float = 0.0  # when it was last heard of

    def worked(self) -> bool:
        """Return whether it brought the run forward, as far as is known."""
        by_itself = not self.ours and self.started is not None and self.last - self.started >= SURELY_WORKED_S
        return self.progress or by_itself


@dataclass(frozen=True, kw_only=True)
class Stall:
    """The attempts since the last progress (or since the owner released the job): stalled ones and step-backs."""

    stalled: int
    step_backs: int


def count_stalled(
    events: Iterable[Event], attempts: Sequence[int] = (), *, heard: Mapping[int, float] = MappingProxyType({})
) -> Stall:
    """Count backwards from the newest attempt to the last one that brought a new complete checkpoint or was done.

    `attempts` are the numbers that have a folder: one whose owner died before it wrote to the ledger counts too.
    `heard` says when attempts were last heard of, for those whose batch node was lost with them. An attempt of a script
    that saves by itself counts as stalled only if it ended within SURELY_WORKED_S of its start. A `held` event starts
    the count anew, since only the owner's release lets the job start again.
    """
    known: dict[int, _Attempt] = {}
    reset = -1
    for event in events:
        if event.event in {"held", "accepted"}:
            reset = max([reset, *known, *([event.attempt] if event.attempt is not None else [])])
        elif event.attempt is not None:
            _note(known.setdefault(event.attempt, _Attempt()), event)
    for number, when in heard.items():
        attempt = known.setdefault(number, _Attempt())
        attempt.last = max(attempt.last, when)
    numbers = {number for number in (*known, *attempts) if number > reset}
    return _count([known.get(number, _Attempt()) for number in sorted(numbers, reverse=True)])


def why_stalled(stall: Stall, max_stalled: int) -> str | None:
    """Return why the job should be held, or None if it may go on."""
    if stall.stalled >= max_stalled:
        return f"{stall.stalled} attempts in a row without a new complete checkpoint"
    if stall.step_backs >= MAX_STEP_BACKS:
        return f"{stall.step_backs} attempts in a row stepped back from a node with a standing notice"
    return None


def _note(attempt: _Attempt, event: Event) -> None:
    step = event.fields.get("step")
    attempt.last = max(attempt.last, event.time)
    if event.event == "started":
        attempt.started = event.time
    attempt.ours |= event.event in {"fresh", "resumed"}
    if event.event == "resumed":
        attempt.resumed = int(step) if step is not None else -1
    elif event.event == "step-back":
        attempt.step_back = True
    elif event.event == "committed":
        # saving again what was restored is no progress
        attempt.progress |= step is None or int(step) > attempt.resumed
    elif event.event == "mirrored":
        parsed = parse_checkpoint_name(str(event.fields.get("name", "")))
        attempt.progress |= parsed is not None and parsed[0] == event.attempt and parsed[1] > attempt.resumed
    elif event.event == "decided":
        # a script that saves by itself tells only that it followed the stop
        followed = event.fields.get("cause") == "stop" and bool(event.fields.get("saved")) and not attempt.ours
        attempt.progress |= event.fields.get("cause") == "done" or followed


def _count(newest_first: Iterable[_Attempt]) -> Stall:
    stalled = step_backs = 0
    for attempt in newest_first:
        if attempt.worked():
            break
        stalled += not attempt.step_back
        step_backs += attempt.step_back
    return Stall(stalled=stalled, step_backs=step_backs)
