"""Whether nobody works on a run now, so that its checkpoints may be changed from outside."""

from __future__ import annotations

import time

from pctool.errors import RunInUseError, SlurmError
from pctool.job.claim import ended_for_good
from pctool.job.find import last_job_id, works_elsewhere
from pctool.job.heartbeat import SILENT_S, read_heartbeat
from pctool.run.layout import AttemptDir, RunDir
from pctool.run.records import Claim, read_claim
from pctool.slurm import query
from pctool.slurm.states import Phase, phase


def check_idle(run: RunDir, *, now: float | None = None) -> int:
    """Return the run's newest attempt, -1 if it has none. Raise RunInUseError while a job works on it.

    Slurm tells; where it cannot be asked, or does not know the job, the attempt's own signs of life do: one counts as
    gone after SILENT_S without any, or once it decided to end for good. A job that waits to be requeued works on
    nothing; should it start meanwhile, the fence stops whoever acts for the attempt that is returned here.
    """
    numbers = run.attempt_numbers()
    if not numbers:
        return -1
    attempt = run.attempt(numbers[-1])
    claim = read_claim(attempt)
    jobs = {claim.label if claim else None, last_job_id(run)} - {None}
    unknown = [reason for job in sorted(filter(None, jobs)) if (reason := _check_job(run, job))]
    if unknown or not jobs:
        _check_silent(run, attempt, claim, unknown[0] if unknown else "it left no claim", now or time.time())
    return attempt.number


def _check_job(run: RunDir, label: str) -> str:
    """Raise RunInUseError if the job runs; return why that is not known, "" if it does not run."""
    try:
        state = query.job_states([label]).get(label)
        if state is None or works_elsewhere(label, run.path):
            return f"Slurm does not know job {label}"
    except SlurmError as error:
        return f"Slurm could not be asked: {error.what}"
    if phase(state) in {Phase.RUNNING, Phase.COMPLETING}:
        raise _in_use(run, f"job {label} is {state}", f"end it first with `pctool stop {label}`")
    return ""


def _check_silent(run: RunDir, attempt: AttemptDir, claim: Claim | None, reason: str, now: float) -> None:
    beat = read_heartbeat(attempt)
    heard = max(claim.time if claim else 0.0, beat.time if beat else 0.0)
    if now - heard > SILENT_S or ended_for_good(run, attempt.number):
        return
    what = f"attempt {attempt.number} may be at work: it was heard {max(now - heard, 0):.0f} s ago, and {reason}"
    raise _in_use(run, what, f"wait until it ends, or until nothing was heard of it for {SILENT_S:.0f} s")


def _in_use(run: RunDir, what: str, fix: str) -> RunInUseError:
    return RunInUseError(f"this run is in use: {what}", where=str(run.path), fix=fix)
