"""From what a run left behind to a verdict: pure functions over the ledger, the metrics and a few observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pctool.run.ledger import Event

ADVICE = {
    "survived": "read the log with `pctool logs {run}` and the causes with `pctool attempts {run}`",
    "steps": "save more often (`every=` in Run, or `every` in [checkpoint]), or make a step shorter than the notice",
    "losses": "seed everything, restore every state that changes (pass it to Run), and use deterministic kernels",
    "samples": "draw the order of samples from ResumableSampler and pass that sampler to Run",
    "weights": "pass model, optimizer and scheduler to Run; state outside of them is lost at a restart",
    "deadline": "make the checkpoint smaller or the store faster: the save must fit into the notice",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One scenario's outcome. Times are seconds, unscaled as measured; None where the scenario has no such time."""

    scenario: str
    passed: bool
    steps_lost: int | None = None
    notice_to_durable_s: float | None = None
    end_to_restart_s: float | None = None
    restart_to_first_step_s: float | None = None
    losses_equal: bool | None = None
    samples_equal: bool | None = None
    weights_equal: bool | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the stable JSON shape."""
        return asdict(self)


@dataclass(frozen=True)
class Problem:
    """One thing that went wrong; `advice` is a key of ADVICE."""

    what: str
    advice: str = "survived"


Trace = Mapping[int, Mapping[str, Any]]  # step -> what was logged at it


def merge_traces(attempts: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Merge one rank's metrics over attempts; return them by step and the steps that two attempts saw differently.

    A step that was lost is done again, so it may appear twice; both must be the same. Several lines of one step in one
    attempt are one record, of which a killed rank may have written a part.
    """
    merged: dict[int, dict[str, Any]] = {}
    differing = []
    for records in attempts:
        by_step: dict[int, dict[str, Any]] = {}
        for record in records:
            by_step.setdefault(int(record["step"]), {}).update(record)
        differing += [step for step, record in by_step.items() if _contradict(merged.get(step, {}), record)]
        for step, record in by_step.items():
            merged.setdefault(step, {}).update(record)
    return merged, sorted(set(differing))


def _contradict(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(one[key] != other[key] for key in one.keys() & other.keys())


def first_difference(baseline: Mapping[int, Trace], run: Mapping[int, Trace], key: str) -> str | None:
    """Return where two runs differ in `key` (the first rank and step), or None if they agree step by step.

    Both are rank -> step -> record. A step one of them lacks is a difference.
    """
    if baseline.keys() != run.keys():
        return f"ranks {sorted(run)} logged, {sorted(baseline)} in the baseline"
    for rank in sorted(baseline):
        expected, got = baseline[rank], run[rank]
        for step in sorted(expected.keys() | got.keys()):
            if step not in got or step not in expected:
                return f"rank {rank} {'did not log' if step not in got else 'logged an extra'} step {step}"
            if expected[step].get(key) != got[step].get(key):
                return f"rank {rank} step {step}: {got[step].get(key)} instead of {expected[step].get(key)}"
    return None


def steps_lost(last_steps: Mapping[int, int], resumed: Mapping[int, int]) -> int:
    """Return the steps done in an attempt that the next one did again.

    `last_steps`: attempt -> last finished step, `resumed`: attempt -> first step it did; an attempt without steps is
    in neither. Steps count from 0.
    """
    lost = 0
    furthest = -1
    for attempt in sorted(last_steps.keys() | resumed.keys()):
        if attempt in resumed:
            lost += max(0, furthest + 1 - resumed[attempt])
        furthest = last_steps.get(attempt, furthest)
    return lost


def find(events: Iterable[Event], name: str, *, attempt: int | None = None, after: float = 0.0) -> Event | None:
    """Return the first event of that name (of that attempt, after that time), or None."""
    for event in events:
        if event.event == name and event.time >= after and (attempt is None or event.attempt == attempt):
            return event
    return None


def seconds_between(events: Sequence[Event], ended: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return (end to restart, restart to first step) of the first restart that did a step.

    The end is that of the last attempt before it that did steps, so attempts that only stepped back are part of the
    wait. `ended`: attempt -> when it ended, where it left no `decided` event (its batch host died).
    """
    worked = [event for event in events if event.event == "first-step"]
    if len(worked) < 2:
        return None, None
    before, step = worked[0].attempt or 0, worked[1]
    claim = find(events, "claim", attempt=step.attempt)
    if claim is None:
        return None, None
    decided = find(events, "decided", attempt=before)
    end = decided.time if decided else ended.get(before)
    return (claim.time - end if end is not None else None), step.time - claim.time
