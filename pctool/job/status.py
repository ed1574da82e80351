"""How a run stands now: attempt, step, newest durable checkpoint, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pctool.checkpoint.lineage import durable
from pctool.checkpoint.stores import order
from pctool.errors import NotFoundError, PctoolError
from pctool.job.doomed import Doomed, doomed
from pctool.job.find import Found, find_run, last_job_id, remembered_ids
from pctool.job.heartbeat import Heartbeat, read_heartbeat
from pctool.job.hold import ADVICE
from pctool.job.stop import follows
from pctool.run.ledger import Event, Ledger
from pctool.run.stop import read_stop
from pctool.slurm import query
from pctool.slurm.comment import parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, is_ended, phase
from pctool.units import format_duration

QUIET_S = 120.0  # a step that takes longer is worth a word; the longest honest ones are evaluation and compilation


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """The newest durable checkpoint that the ledger knows, and on which tiers it is."""

    name: str
    step: int
    age_s: float | None
    tiers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Status:
    """One run and its job. Ages are seconds, times seconds since the epoch; None where there is nothing to tell."""

    job_id: str | None
    run_dir: str
    state: str  # Slurm's word, or `gone` for a job that Slurm does not know, `unknown` where it cannot be asked
    attempt: int | None
    cause: str | None  # of the newest attempt, once it is decided
    why: str | None  # the same in a sentence
    reason: str | None  # Slurm's word for what a pending job waits for
    nodes: str
    step: int | None
    step_age_s: float | None
    checkpoint: CheckpointStatus | None
    next_start: float | None  # when Slurm may start the requeued job again
    doomed: Doomed | None  # a node it might get again, with a spot notice
    held: str | None  # why the job is held
    advice: str | None  # what to do before a held job goes on
    notes: tuple[str, ...] = ()


def status_of(found: Found, *, now: float | None = None) -> Status:
    """Return how one run stands, and the job that works on it now: the one asked for may be over long since."""
    now = time.time() if now is None else now
    found, notes = _current(found)
    events = Ledger(found.run.ledger).read()
    number = max(found.run.attempt_numbers(), default=None)
    beat = read_heartbeat(found.run.attempt(number)) if number is not None else None
    step, step_time = _newest_step(beat, events, number)
    start = next_start(found.job)
    cause, why = _cause(found.job, events, number)
    held, advice = _held(found, events)
    return Status(
        job_id=found.job.label if found.job else found.job_id,
        run_dir=str(found.run.path),
        state=_state(found),
        attempt=number,
        cause=cause,
        why=why,
        reason=found.job.reason if found.job and phase(found.job.state) is Phase.PENDING else None,
        nodes=found.job.node_list if found.job else "",
        step=step,
        step_age_s=round(now - step_time, 1) if step_time else None,
        checkpoint=newest_checkpoint(events, now),
        next_start=start,
        doomed=doomed(events, now=now) if start else None,
        held=held,
        advice=advice,
        notes=(*notes, *_notes(found, beat, events, number, now)),
    )


def status_of_mine(*, jobs: Path) -> list[Status]:
    """Return a status for each of the caller's waiting and running jobs of pctool.

    One whose run directory cannot be read is listed with the reason. Raises SlurmError if Slurm does not answer.
    """
    known = remembered_ids(jobs)
    ours = [line for line in query.my_jobs() if parse_comment(line.comment) or _is_known(line.label, known, jobs)]
    return [_status_or_why(line.label, line.state, jobs) for line in ours]


def _is_known(label: str, known: Container[str], jobs: Path) -> bool:
    """Return whether this is a batch script that was submitted as it stands; its id alone may be another cluster's."""
    if label.partition("_")[0] not in known:
        return False
    try:
        find_run(label, jobs=jobs)
    except NotFoundError:
        return False
    return True


def as_json(status: Status) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool status --json`."""
    return asdict(status)


def next_start(job: JobInfo | None) -> float | None:
    """Return when a requeued job that waits may start again; None for a job that does not wait for that."""
    if job is None or phase(job.state) is not Phase.PENDING or job.held or job.restarts == 0:
        return None
    return job.eligible_time


def newest_checkpoint(events: Sequence[Event], now: float) -> CheckpointStatus | None:
    """Return the newest durable checkpoint of the current lineage, by the ledger."""
    known = durable(events)
    if not known:
        return None
    name = max(known, key=order)
    mine = [event for event in events if event.fields.get("name") == name]
    times = [event.time for event in mine if event.event in {"committed", "mirrored"}]
    on_posix = any(event.event == "committed" or event.fields.get("tier") == "posix" for event in mine)
    on_s3 = any(event.event == "mirrored" or event.fields.get("tier") == "s3" for event in mine)
    return CheckpointStatus(
        name=name,
        step=known[name],
        age_s=round(now - min(times), 1) if times else None,
        tiers=tuple(tier for tier, there in (("posix", on_posix), ("s3", on_s3)) if there),
    )


def _newest_step(
    beat: Heartbeat | None, events: Sequence[Event], number: int | None
) -> tuple[int | None, float | None]:
    """Return the attempt's last known step and its time: by the heartbeat, or by a commit since then."""
    steps = [(beat.step, beat.step_time)] if beat and beat.step >= 0 else []
    commits = [event for event in events if event.event == "committed" and event.attempt == number]
    steps += [(int(event.fields["step"]), event.time) for event in commits]
    return max(steps, default=(None, None))


def _status_or_why(label: str, state: str, jobs: Path) -> Status:
    try:
        return status_of(find_run(label, jobs=jobs))
    except (PctoolError, OSError) as error:
        why = error.what if isinstance(error, PctoolError) else str(error)
        return Status(
            job_id=label, run_dir="", state=state, attempt=None, cause=None, why=None, reason=None, nodes="", step=None,
            step_age_s=None, checkpoint=None, next_start=None, doomed=None, held=None, advice=None, notes=(why,),
        )  # fmt: skip


def _state(found: Found) -> str:
    if found.job is not None:
        return found.job.state
    return "unknown" if found.slurm_silent else "gone"


def _current(found: Found) -> tuple[Found, list[str]]:
    """Return the run's newest job where the one found has ended and another one works on its run since."""
    newest = last_job_id(found.run)
    job = found.job
    if newest is None or found.slurm_silent or (job and (newest in (job.job_id, job.label) or not is_ended(job.state))):
        return found, []
    later = find_run(str(found.run.path), jobs=found.run.path)
    if job is None:
        return later, []
    return later, [f"job {job.label} is over ({job.state}); this is job {newest}, which took on its run"]


def _cause(job: JobInfo | None, events: Sequence[Event], number: int | None) -> tuple[str | None, str | None]:
    """Return how the newest attempt ended, and why; Nones while it runs."""
    decided = [event for event in events if event.event == "decided" and event.attempt == number]
    if job is not None and job.state == "CANCELLED":
        return "cancelled", "ended by scancel, without a save"
    if not decided:
        return None, None
    return str(decided[-1].fields.get("cause")), str(decided[-1].fields.get("why") or "") or None


def _held(found: Found, events: Sequence[Event]) -> tuple[str | None, str | None]:
    """Return why the job is held, and what to do about it."""
    job = found.job
    if job is None or not job.held or phase(job.state) is not Phase.PENDING:
        return None, None
    ours = [event for event in events if event.event == "held"]
    rule = str(ours[-1].fields.get("rule")) if ours else ""
    advice = ADVICE.get(rule, "`scontrol release {job}`").format(job=job.label, run=found.run.path)
    comment = parse_comment(job.comment)
    if comment is not None and comment.note.startswith("held: "):
        return comment.note.removeprefix("held: "), advice
    why = str(ours[-1].fields.get("why")) if ours else f"held by its owner or an administrator ({job.reason})"
    return why, advice


def _notes(found: Found, beat: Heartbeat | None, events: Sequence[Event], number: int | None, now: float) -> list[str]:
    notes = [f"Slurm could not be asked: {found.slurm_silent}"] if found.slurm_silent else []
    if found.job is not None and phase(found.job.state) is Phase.RUNNING and number is not None:
        notes += _quiet(beat, events, number, now)
        notes += _unheeded(found, beat, events, number, now)
    missing = unmirrored(events)
    if missing:
        notes.append(f"not mirrored: {', '.join(missing)}")
    return notes


def _quiet(beat: Heartbeat | None, events: Sequence[Event], number: int | None, now: float) -> list[str]:
    """Return a word about a running job that makes no steps."""
    if beat is not None and beat.saving_since:
        return [f"saving for {format_duration(now - beat.saving_since)}"]
    since = beat.step_time if beat and beat.step >= 0 else _claimed(events, number)
    if since is None or now - since < QUIET_S:
        return []
    what = "no step" if beat and beat.step >= 0 else "no step yet in this attempt"
    return [f"{what} for {int(now - since) // 60} min"]


def _unheeded(found: Found, beat: Heartbeat | None, events: Sequence[Event], number: int, now: float) -> list[str]:
    """Return a word about a stop that the ranks have not followed for longer than a step takes."""
    stop = read_stop(found.run.attempt(number))
    asked = [event.time for event in events if event.event == "stop-requested" and event.attempt == number]
    if stop is None or (asked and now - asked[0] < QUIET_S) or (beat is not None and beat.saving_since):
        return []
    said = f"asked to stop ({stop.why}){f' by {stop.who}' if stop.who else ''}"
    if not asked:
        return [f"{said}, not yet seen by the launches"]
    why = (
        ""
        if follows(found.run, number, events)
        else ": its script uses neither pctool.train nor --stop-signal, or has not come so far"
    )
    since = format_duration(now - asked[0])
    label = found.job.label if found.job else found.job_id  # the bare id of a task may be that of its whole array
    return [f"{said} {since} ago, and it still runs{why}; `scancel {label}` ends it without a save"]


def _claimed(events: Sequence[Event], number: int | None) -> float | None:
    return next((event.time for event in reversed(events) if event.event == "claim" and event.attempt == number), None)


def unmirrored(events: Sequence[Event]) -> list[str]:
    """Return the checkpoints that are not on S3 since mirroring failed, of them or of another."""
    state: dict[str, bool] = {}
    for event in events:
        name = str(event.fields.get("name", ""))
        if event.event == "mirrored":
            state[name] = True
        elif event.event == "mirror-failed":
            state.update(dict.fromkeys([name, *event.fields.get("waiting", ())], False))
        elif event.event == "pruned":
            state.pop(name, None)
    return sorted(name for name, done in state.items() if not done)
