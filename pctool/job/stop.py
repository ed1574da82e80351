"""Ask a running job to save and end (or to go on in its next attempt)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.job.find import Found
from pctool.job.runspec import spec_fields
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import read_claim
from pctool.run.stop import StopRequest, read_stop, write_stop
from pctool.slurm import query
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, phase


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A stop that was asked for.

    `slow` says why it takes longer to be seen, if it does; `follows` whether the ranks are known to follow a stop, and
    `again` that one was asked for before.
    """

    job_id: str
    attempt: int
    requeue: bool
    slow: str | None
    follows: bool
    again: bool


def follows(run: RunDir, attempt: int, events: Iterable[Event]) -> bool:
    """Return whether the attempt's ranks follow a stop: they use pctool.train, or get it as a signal."""
    if any(event.attempt == attempt and event.event in {"fresh", "resumed"} for event in events):
        return True
    try:
        return bool(spec_fields(run).get("stop_signal"))
    except UsageError:
        return False  # written by another version


def request_stop(found: Found, *, who: str, requeue: bool) -> Stopping:
    """Write the stop file of the current attempt and wake the batch script.

    The file is what counts: it says who asked and whether the job goes on. The signal only hastens it, since a shared
    file system may show the file late. Raises NotFoundError if the job does not run, UsageError before it has
    claimed its attempt (again, after a requeue), and for `requeue` where Slurm may not requeue it.
    """
    job = _running(found)
    if requeue and not job.requeue:
        raise UsageError(
            f"job {job.label} was submitted with --no-requeue: it would save and end, and not go on",
            fix=f"leave out --requeue (`pctool stop {job.label}`), then submit it again with the same run-dir",
        )
    number = max(found.run.attempt_numbers(), default=None)
    claim = read_claim(found.run.attempt(number)) if number is not None else None
    # a requeue keeps the id, and counts as running while its nodes boot: only the restart tells whose attempt it is
    if number is None or claim is None or (claim.job_id, claim.restart) != (job.job_id, job.restarts):
        raise UsageError(
            f"job {job.label} is {job.state} but has not claimed its attempt yet (its nodes may still boot)",
            where=str(found.run.attempts),
            fix=f"try again once `pctool status {job.label}` shows it, or end it without a save: `scancel {job.label}`",
        )
    attempt = found.run.attempt(number)
    earlier = read_stop(attempt)
    deadline = earlier.deadline if earlier else 0.0  # of a notice that is being answered already
    write_stop(attempt, StopRequest(why="user", who=who, deadline=deadline, requeue=requeue))
    return Stopping(
        job_id=job.label,
        attempt=number,
        requeue=requeue,
        slow=_wake(job.label),
        follows=follows(found.run, number, Ledger(found.run.ledger).read()),
        again=earlier is not None,
    )


def _running(found: Found) -> JobInfo:
    job = found.job
    if job is None and found.job_id is None:
        raise NotFoundError("no job has worked here yet", where=str(found.run.path), fix="see `pctool status`")
    if job is None and found.slurm_silent:
        raise SlurmError(
            f"job {found.job_id} cannot be stopped: Slurm could not be asked: {found.slurm_silent}",
            where=str(found.run.path),
            fix="try again once `scontrol ping` finds slurmctld up",
        )
    if job is None:
        what = f"job {found.job_id} is not running: Slurm does not have it"
        raise NotFoundError(what, where=str(found.run.path), fix="see `pctool status`")
    if found.successor_of is not None:
        raise NotFoundError(
            f"job {found.successor_of} is not running: Slurm does not have it; job {job.label} took on its run",
            where=str(found.run.path),
            fix=f"if that is the one you mean: `pctool stop {job.label}`",
        )
    if phase(job.state) is Phase.PENDING:
        raise NotFoundError(
            f"job {job.label} is not running, it waits ({job.state}, {job.reason}): there is nothing to save",
            fix=f"take it out of the queue with `scancel {job.label}`; its checkpoints stay",
        )
    if phase(job.state) is not Phase.RUNNING:
        raise NotFoundError(f"job {job.label} is not running, it is {job.state}", fix="see `pctool status`")
    return job


def _wake(label: str) -> str | None:
    """Signal the batch script of this job, or of this one task of an array; return what Slurm said if it could not."""
    try:
        query.ask(["scancel", "--batch", "--signal=USR1", label])
    except SlurmError as error:
        return error.what
    return None
