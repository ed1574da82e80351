"""What happened in each attempt of a run, from the run directory alone: no accounting, no Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pctool.errors import IncompleteError
from pctool.job.heartbeat import Heartbeat, read_heartbeat
from pctool.run.layout import AttemptDir, RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import Claim, NodeExit, read_claim, read_node_exits

RUNNING = "running"
PHASES = ("queued", "starting", "restoring", "training", "ending")
_END_OF_TRAINING = frozenset({"stop-requested", "peer-lost", "node-exit", "decided"})


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt. Steps are counted as done, over all attempts; None where there was none, or it is not known.

    `lost_steps` are those done and not saved: this attempt's last step less the step that the next one resumed from
    (for the newest attempt: less its newest checkpoint). `phases` are seconds: queued (since the submission or the end
    of the attempt before), starting (claim to a complete gang), restoring (to the end of the first step), training (to
    the stop, loss or end), ending (to the decision).
    """

    attempt: int
    job_id: str | None
    restart: int | None
    nodes: tuple[str, ...]
    cause: str  # running | done | stop | peer-lost | program-error | signal
    first_step: int | None
    last_step: int | None
    lost_steps: int | None
    phases: Mapping[str, float | None]
    why: str
    started: float | None  # when it was claimed, seconds since the epoch
    ended: float | None


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """Everything that is on disk about one attempt."""

    number: int
    events: Sequence[Event]
    claim: Claim | None
    heartbeat: Heartbeat | None
    exits: Mapping[str, NodeExit]


def attempts_of(run: RunDir, *, alive: bool) -> list[AttemptRow]:
    """Return every attempt, oldest first. `alive` says whether the newest attempt's job still runs."""
    events = Ledger(run.ledger).read()
    claimed = {event.attempt for event in events if event.event == "claim" and event.attempt is not None}
    facts = [gather(run.attempt(number), events) for number in sorted({*run.attempt_numbers(), *claimed})]
    return rows(facts, submitted=_submitted(events), alive=alive)


def gather(attempt: AttemptDir, events: Iterable[Event]) -> AttemptFacts:
    """Read what is on disk about one attempt; a damaged claim or node record counts as none."""
    return AttemptFacts(
        number=attempt.number,
        events=[event for event in events if event.attempt == attempt.number],
        claim=_claim(attempt),
        heartbeat=read_heartbeat(attempt),
        exits=_exits(attempt),
    )


def rows(facts: Sequence[AttemptFacts], *, submitted: float | None, alive: bool) -> list[AttemptRow]:
    """Return one row an attempt, from facts in the order of their numbers."""
    made: list[AttemptRow] = []
    since = submitted
    for position, one in enumerate(facts):
        newest = position == len(facts) - 1
        following = facts[position + 1] if not newest else None
        made.append(_row(one, since, following, running=newest and alive and _last(one, "decided") is None))
        since = made[-1].ended
    return made


def as_json(table: Iterable[AttemptRow]) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool attempts --json`."""
    return {"attempts": [{**asdict(row), "nodes": list(row.nodes), "phases": dict(row.phases)} for row in table]}


def _row(one: AttemptFacts, since: float | None, following: AttemptFacts | None, *, running: bool) -> AttemptRow:
    claim = _last(one, "claim")
    cause, why = _cause(one, running)
    ended = None if running else _end(one)
    last_step = _last_step(one)
    return AttemptRow(
        attempt=one.number,
        job_id=one.claim.job_id if one.claim else _text(claim, "job_id"),
        restart=one.claim.restart if one.claim else None,
        nodes=one.claim.nodes if one.claim else tuple(claim.fields.get("nodes", ()) if claim else ()),
        cause=cause,
        first_step=_step(_first(one, "first-step")),
        last_step=last_step,
        lost_steps=None if running or last_step is None else max(0, last_step - _kept(one, following)),
        phases=_phases(one, since, ended),
        why=why,
        started=_started(one),
        ended=ended,
    )


def _cause(one: AttemptFacts, running: bool) -> tuple[str, str]:
    decided = _last(one, "decided")
    if decided is not None:
        return str(decided.fields.get("cause")), str(decided.fields.get("why", ""))
    if running:
        return RUNNING, ""
    causes = {record.cause for record in one.exits.values()}
    if "program-error" in causes:
        return "program-error", "the batch script ended before it decided"
    if causes == {"signal"}:
        return "signal", "Slurm ended the job: cancelled, requeued by hand, or out of time"
    return "peer-lost", "the batch host left no decision: its node was lost, or the job was cancelled"


def _phases(one: AttemptFacts, since: float | None, ended: float | None) -> dict[str, float | None]:
    """Return seconds a phase. One that was never reached is None; the one in which the attempt ended ends there."""
    first = _time(_first(one, "first-step"))
    stops = [event.time for event in one.events if event.event in _END_OF_TRAINING and first and event.time >= first]
    stopped = min(stops, default=ended) if first is not None else None
    edges = [since, _started(one), _time(_first(one, "started")), first, stopped]
    reached = [edge if edge is not None else ended for edge in edges[1:]] + [ended]
    return {
        name: round(max(0.0, end - begin), 3) if begin is not None and end is not None else None
        for name, begin, end in zip(PHASES, edges, reached, strict=True)
    }


def _kept(one: AttemptFacts, following: AttemptFacts | None) -> int:
    """Return the step up to which the attempt's work was kept."""
    if following is not None and _first(following, "resumed"):
        return _step(_first(following, "resumed")) or 0
    if following is not None and _first(following, "fresh"):
        return 0
    resumed = _step(_first(one, "resumed")) or 0
    return max([resumed, *(_step(event) or 0 for event in one.events if event.event in {"committed", "mirrored"})])


def _last_step(one: AttemptFacts) -> int | None:
    """Return the last step that is known to be done; the heartbeat tells it to within five seconds."""
    steps = [_step(event) for event in one.events if event.event in {"first-step", "committed"}]
    steps.append(one.heartbeat.step if one.heartbeat and one.heartbeat.step >= 0 else None)
    return max((step for step in steps if step is not None), default=None)


def _started(one: AttemptFacts) -> float | None:
    return one.claim.time if one.claim else _time(_last(one, "claim"))


def _end(one: AttemptFacts) -> float | None:
    """Return when the attempt ended: at its decision, or when it was last heard of."""
    decided = _last(one, "decided")
    if decided is not None:
        return decided.time
    heard = [event.time for event in one.events] + [record.time for record in one.exits.values()]
    heard += [one.heartbeat.time] if one.heartbeat else []
    return max(heard, default=_started(one))


def _submitted(events: Iterable[Event]) -> float | None:
    return next((event.time for event in events if event.event == "submitted"), None)


def _first(one: AttemptFacts, name: str) -> Event | None:
    return next((event for event in one.events if event.event == name), None)


def _last(one: AttemptFacts, name: str) -> Event | None:
    return next((event for event in reversed(one.events) if event.event == name), None)


def _time(event: Event | None) -> float | None:
    return event.time if event else None


def _step(event: Event | None) -> int | None:
    step = event.fields.get("step") if event else None
    return int(step) if step is not None else None


def _text(event: Event | None, key: str) -> str | None:
    return str(event.fields[key]) if event and key in event.fields else None


def _claim(attempt: AttemptDir) -> Claim | None:
    try:
        return read_claim(attempt)
    except IncompleteError:
        return None


def _exits(attempt: AttemptDir) -> Mapping[str, NodeExit]:
    try:
        return read_node_exits(attempt)
    except IncompleteError:
        return {}
