"""End the wait of one's own requeued jobs: Slurm lets a requeued job start only cred_expire + 1 s later.

The owner of a job may set its start to now once it is pending. Held jobs are never touched, nor is a begin time that
the user asked for: a job that was never restarted, or one that waits far longer than a requeue makes it wait. A job
that might get a node with a spot notice again is left alone until the notice is over: it would only step back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pctool.errors import NotFoundError, SlurmError
from pctool.job.doomed import Doomed, doomed
from pctool.job.find import run_of
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.comment import parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, phase

# What waits costs: squeue for one user's jobs. 3 s keep the mean delay at 1.5 s, where the wait itself is 71 s as
# ParallelCluster ships it.
WATCH_S = 3.0
DEFAULT_CRED_EXPIRE_S = 120  # man slurm.conf, AuthInfo
_SLACK_S = 60  # clocks, and the seconds between the requeue and the first look
# A slurmd refuses a credential as old as the end of the attempt before, in whole seconds of slurmctld's clock, and the
# job then fails for good ("Job credential revoked", seen on 22.05.8). So a start in the second of the requeue is ruled
# out, by waiting on our own clock: the clocks of two machines need not agree, except on what is a minute ago.
_REVOKED_S = 1.1
_SURELY_OVER_S = 60
# Slurm says NonZeroExitCode until its next scheduling pass and BeginTime from then on (seen on 22.05.8)
_WAITS = frozenset({"BeginTime", "NonZeroExitCode"})


@dataclass(frozen=True, kw_only=True)
class Nudge:
    """What was done for one job: `saved_s` is the wait that was left.

    `error` is Slurm's refusal, `doomed` the node for which nothing was done.
    """

    job: JobInfo
    saved_s: float = 0.0
    error: str | None = None
    doomed: Doomed | None = None


def is_due(job: JobInfo, *, now: float, longest_wait_s: float) -> bool:
    """Return whether this job only waits for the delay after a requeue."""
    return (
        phase(job.state) is Phase.PENDING
        and not job.held
        and job.restarts > 0
        and parse_comment(job.comment) is not None
        and job.reason in _WAITS
        and (job.eligible_time is None or job.eligible_time - now <= longest_wait_s)
    )


def longest_wait(settings: Mapping[str, str]) -> float:
    """Return how long Slurm makes a requeued job wait at most, in seconds, from AuthInfo's cred_expire."""
    match = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    return (int(match[1]) if match else DEFAULT_CRED_EXPIRE_S) + 1 + _SLACK_S


def nudge(jobs: Sequence[str] = (), *, done: Container[tuple[str, int]] = ()) -> list[Nudge]:
    """Nudge these jobs (none named: all of the caller's) once and return what was done.

    `done` are restarts, (job id, restart count), that were nudged before: each nudge sends a job back to the end of
    the scheduler's pass, so that nudging without end keeps it from starting at all (seen on 22.05.8). Takes a second
    more for a job requeued in the last minute.

    Raises NotFoundError for a named job that is not there or not one of ours, SlurmError if Slurm does not answer.
    """
    found = [_named(job) for job in jobs] if jobs else list(_waiting())
    if not found:
        return []
    limit = longest_wait(query.config())
    now = time.time()
    due = [job for job in found if _restart(job) not in done and is_due(job, now=now, longest_wait_s=limit)]
    waits = {job.job_id: _doomed(job, now) for job in due}
    if any(_just_requeued(job, now) and not waits[job.job_id] for job in due):
        time.sleep(_REVOKED_S)
    return [Nudge(job=job, doomed=node) if (node := waits[job.job_id]) else _nudge(job, now) for job in due]


def watch(jobs: Sequence[str] = ()) -> Iterator[Nudge]:
    """Nudge for ever, and yield what was done, once for each restart of a job.

    A silent slurmctld is waited out, a refusal is tried again; a named job that is gone ends the watch.
    """
    told: set[tuple[tuple[str, int], str | None, Doomed | None]] = set()
    nudged: set[tuple[str, int]] = set()
    while True:
        try:
            found = nudge(jobs, done=nudged)
        except SlurmError:
            found = []
        nudged |= {_restart(one.job) for one in found if one.error is None and one.doomed is None}
        for one in found:
            if (key := (_restart(one.job), one.error, one.doomed)) not in told:
                told.add(key)
                yield one
        time.sleep(WATCH_S)


def _doomed(job: JobInfo, now: float) -> Doomed | None:
    run = run_of(job)
    try:
        return doomed(Ledger(run.ledger).read(), now=now) if run else None
    except OSError:
        return None  # its own start says what is wrong with the run directory


def _just_requeued(job: JobInfo, now: float) -> bool:
    return job.submit_time is None or now - job.submit_time < _SURELY_OVER_S


def _restart(job: JobInfo) -> tuple[str, int]:
    return job.job_id, job.restarts


def _waiting() -> Iterable[JobInfo]:
    for line in query.my_jobs():
        if parse_comment(line.comment) and phase(line.state) is Phase.PENDING:
            job = query.show_job(line.job_id)
            if job is not None:
                yield job


def _named(job_id: str) -> JobInfo:
    job = query.show_job(job_id)
    if job is None:
        raise NotFoundError(f"Slurm does not know job {job_id}", fix="see `pctool status`")
    if parse_comment(job.comment) is None:
        raise NotFoundError(f"job {job_id} is not one of pctool's", fix="see `pctool status`")
    return job


def _nudge(job: JobInfo, now: float) -> Nudge:
    saved = max(0.0, job.eligible_time - now) if job.eligible_time is not None else 0.0
    try:
        # by its label: the task that started last has the id of its whole array, whose running tasks Slurm refuses
        query.ask(["scontrol", "update", f"JobId={job.label}", "StartTime=now"])
    except SlurmError as error:
        return Nudge(job=job, error=error.what)
    return Nudge(job=job, saved_s=saved)
