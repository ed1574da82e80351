"""Hold the job that runs this batch script, with the reason where its owner will look: ledger, comment, output."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctool.errors import HOLD, SlurmError
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.command import RefusedError, failed
from pctool.slurm.comment import format_comment, parse_comment

ALREADY_PENDING = "pending execution"  # what `scontrol requeue` says of a job that is requeued already
# What scontrol says where slurmctld has understood and will not. All else it may say (cannot be contacted, timed out,
# zero bytes, authentication, `can not be altered now`) passes, and is met with another try. Source: slurm_errno.c.
_REFUSALS = (
    "Access/permission denied",
    "Invalid job id",
    "Invalid user id",
    "Job/step already completing or completed",
    "Requested operation is presently disabled",
    "Requested operation not supported",
)
ADVICE = {
    "stalled": "see why in `pctool logs {job}`, then start the count anew with `scontrol release {job}`",
    "below-durable": "bring the checkpoints back, or accept the loss with `pctool resume {job} --from STEP`; "
    "then `scontrol release {job}`",
    "store-unreadable": "see to it that the store can be read (`pctool doctor`), then `scontrol release {job}`",
    "foreign-checkpoints": "submit it again with another store prefix or --run-dir, or go on from those with "
    "`pctool resume {job} --from STEP`; then `scontrol release {job}`",
    "run-unwritable": "see to it that {run} can be written (is the disk full?), then `scontrol release {job}`",
    "claim-unreadable": "mend that file, or remove it if the job of that attempt is over; "
    "then `scontrol release {job}`",
    "slurm-silent": "see to it that Slurm's commands answer on the nodes (`pctool doctor`), "
    "then `scontrol release {job}`",
    "run-missing": "bring {run} back, or accept a new start with `pctool resume {job} --from 0`; "
    "then `scontrol release {job}`",
}
_NOTE_CHARS = 300  # Slurm keeps 1024 characters of a comment; the run directory needs some


@dataclass(frozen=True, kw_only=True)
class Held:
    """The job was held: why, by which rule, what to do, and with which code the batch script should exit."""

    rule: str
    why: str
    code: int
    how: str  # exit-code | scontrol

    def advice(self, job_id: str, run: RunDir) -> str:
        """Return what the owner should do before the job may go on."""
        return ADVICE[self.rule].format(job=job_id, run=run.path)


def hold(run: RunDir, *, job_id: str, rule: str, why: str, attempt: int | None) -> Held:
    """Hold this job and return the code to exit with.

    Where RequeueExitHold has 86, that exit code holds; else `scontrol requeuehold`, which the job's owner may use.
    `job_id` is the id as those commands take it: 9_1 for a task of an array.
    Where Slurm does not answer for half an hour, the exit code is all that is left. Raises SlurmError if Slurm refuses.
    """
    try:
        _, hold_codes = query.patiently(query.requeue_exit_codes, patience=query.LONG_PATIENCE_S)
    except SlurmError as error:
        # exiting with 86 holds where RequeueExitHold has it; any other way the job is over
        tell(f"pctool: Slurm could not be asked: {error.what}")
        hold_codes = frozenset({HOLD})
    if _is_there(run.ledger):  # one made here would pass for the run's own at the next start
        write_down(run, "held", attempt=attempt, rule=rule, why=why)
    note(run, job_id, f"held: {why}")
    by_scontrol = HOLD not in hold_codes and requeue(job_id, verb="requeuehold")
    return Held(rule=rule, why=why, code=HOLD, how="scontrol" if by_scontrol else "exit-code")


def _is_there(path: Path) -> bool:
    """Return whether the file is there; a file system that does not say must not keep the job from being held."""
    try:
        return path.exists()
    except OSError:
        return False


def write_down(run: RunDir, event: str, *, attempt: int | None, **fields: Any) -> None:
    """Append to the ledger; where that cannot be written, say so: what becomes of the job does not hang on it."""
    try:
        Ledger(run.ledger).append(event, attempt=attempt, **fields)
    except OSError as error:
        tell(f"pctool: {run.ledger} cannot be written ({error.strerror}): {event} {fields}")


def tell(text: str) -> None:
    """Print one line to the job's output. If that lies on a full disk, the exit code must get through all the same."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def requeue(job_id: str, *, verb: str = "requeue") -> bool:
    """Requeue this running job by `scontrol requeue` (or `requeuehold`); that it is pending already is success.

    `job_id` is 9_1 for a task of an array: the id of the one that started last is that of the whole array, and Slurm
    would requeue all of it. Returns False, and says so in the job's output, where Slurm does not answer for half an
    hour: the exit code is all that is left then. Raises SlurmError with Slurm's words if it refuses.
    """
    try:
        query.patiently(lambda: _requeue_once(job_id, verb), patience=query.LONG_PATIENCE_S)
    except RefusedError:
        raise
    except SlurmError as error:
        tell(f"pctool: `scontrol {verb} {job_id}` did not get through, so the exit code must do: {error.what}")
        return False
    return True


def _requeue_once(job_id: str, verb: str) -> None:
    done = query.ask(["scontrol", verb, job_id], check=False)
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    if done.code == 0 or ALREADY_PENDING in said:
        return
    if any(refusal in said for refusal in _REFUSALS):
        raise RefusedError(
            f"`scontrol {verb} {job_id}` was refused: {said}",
            fix="submit the job with requeue allowed (Requeue=1), or resubmit it: the next attempt resumes by itself",
        )
    raise failed(done)


def note(run: RunDir, job_id: str, text: str) -> str | None:
    """Put a note behind the run directory in the job's comment ('' removes it).

    Return what went wrong, if anything: a note is a help for people, the ledger has the reason anyway.
    """
    try:
        job = query.show_job(job_id)
        ours = parse_comment(job.comment) if job else None
        if (ours.note if ours else "") == text or (ours is None and job is not None and job.comment):
            return None  # said already, or a comment of the user's own, which stays
        comment = format_comment(ours.run_dir if ours else str(run.path), text[:_NOTE_CHARS])
        query.ask(["scontrol", "update", f"JobId={job_id}", f"Comment={comment}"])
    except SlurmError as error:
        return error.what
    return None
