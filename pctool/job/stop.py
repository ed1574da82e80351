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
    file system may show the file late. Raises NotFoundError if the job does not run, UsageError before its first
    attempt has begun.
    """
    job_id = _running(found)
    number = max(found.run.attempt_numbers(), default=None)
    claim = read_claim(found.run.attempt(number)) if number is not None else None
    if number is None or claim is None or (found.job is not None and claim.job_id != found.job.job_id):
        raise UsageError(
            f"job {job_id} runs but has not claimed its attempt yet",
            where=str(found.run.attempts),
            fix=f"try again in a moment, or end it without a save: `scancel {job_id}`",
        )
    attempt = found.run.attempt(number)
    earlier = read_stop(attempt)
    deadline = earlier.deadline if earlier else 0.0  # of a notice that is being answered already
    write_stop(attempt, StopRequest(why="user", who=who, deadline=deadline, requeue=requeue))
    return Stopping(
        job_id=job_id,
        attempt=number,
        requeue=requeue,
        slow=_wake(job_id),
        follows=follows(found.run, number, Ledger(found.run.ledger).read()),
        again=earlier is not None,
    )


def _running(found: Found) -> str:
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
    if phase(job.state) is Phase.PENDING:
        raise NotFoundError(
            f"job {job.label} is not running, it waits ({job.state}, {job.reason}): there is nothing to save",
            fix=f"take it out of the queue with `scancel {job.label}`; its checkpoints stay",
        )
    if phase(job.state) is not Phase.RUNNING:
        raise NotFoundError(f"job {job.label} is not running, it is {job.state}", fix="see `pctool status`")
    return job.label


def _wake(job_id: str) -> str | None:
    try:
        query.ask(["scancel", "--batch", "--signal=USR1", job_id])
    except SlurmError as error:
        return error.what
    return None
