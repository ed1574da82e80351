"""Decide, after srun, whether the job is requeued: the one place where that is done.

`decide` is pure. srun's code never enters it: after the silent loss of a node the survivors die of a communication
error and srun returns 1 although nothing is wrong with the program, and after a stop it may return 0 or 143. What the
launches wrote down says how each node ended.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pctool.errors import HOLD, REQUEUE, FencedError, IncompleteError, SlurmError, UsageError
from pctool.job.array import task_label
from pctool.job.hold import requeue as requeue_by_scontrol
from pctool.job.hold import tell, write_down
from pctool.job.lostnodes import await_loss
from pctool.job.runspec import spec_fields
from pctool.run import env
from pctool.run.layout import AttemptDir, RunDir
from pctool.run.records import Claim, NodeExit, read_claim, read_node_exit
from pctool.run.stop import StopRequest, read_stop
from pctool.slurm import query
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, phase

NOT_COMPLETE = 4  # stopped, saved or not, and the job may not go on by itself
LOST = 1  # a node was lost and the job may not be requeued
_NO_REQUEUE = "the job was submitted with --no-requeue"
# A rank that dies of one of these did so by its own doing; TERM and KILL come from outside (Slurm, the OOM killer).
CRASHES = frozenset(
    128 + number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of the job: the batch script's exit code, the attempt's cause, why, and whether it is requeued."""

    code: int
    cause: str  # done | stop | peer-lost | program-error | signal | fenced
    why: str
    requeue: bool
    missing: tuple[str, ...] = ()  # nodes that left no record
    saved: bool = False  # a stop was saved


def decide(
    claim: Claim,
    exits: Mapping[str, NodeExit],
    stop: StopRequest | None,
    *,
    attempt: int,
    newest_attempt: int,
    may_requeue: bool,
) -> Decision:
    """Return what becomes of the job, from the nodes' records and the stop request alone."""
    if newest_attempt > attempt:
        return _fenced(newest_attempt)
    missing = [node for node in claim.nodes if node not in exits]
    records = [exits[node] for node in claim.nodes if node in exits]
    if not missing and all(record.cause == "done" for record in records):
        return Decision(code=0, cause="done", why="every node finished", requeue=False)
    faults = [record for record in records if is_fault(record)]
    if faults:
        return _program_error(min(faults, key=lambda record: record.time))
    if stop is not None or any(record.cause == "stop" for record in records):
        # rank 0 commits, on the first node: the others end before they can know whether it could
        saved = any(record.saved for record in records if record.node == claim.nodes[0])
        return _stopped(records, missing, stop, may_requeue, saved=saved)
    return _lost(records, missing, may_requeue)


def is_fault(record: NodeExit) -> bool:
    """Return whether a node ended by the program's own doing: an error, or a crash such as SIGSEGV."""
    return record.cause == "program-error" or (record.cause == "signal" and record.code in CRASHES)


def _fenced(newest: int) -> Decision:
    why = f"attempt {newest} has taken over this run, so this one decides nothing"
    return Decision(code=FencedError.exit_code, cause="fenced", why=why, requeue=False)


def _program_error(first: NodeExit) -> Decision:
    # Slurm would requeue or hold a job whose program happens to exit with one of our own codes, or end it as a success
    code = first.code if first.code not in {0, REQUEUE, HOLD} and 0 < first.code < 256 else 1
    why = f"{first.node}: {first.why or f'the program exited with {first.code}'}"
    return Decision(code=code, cause="program-error", why=why, requeue=False)


def _stopped(
    records: Sequence[NodeExit], missing: Sequence[str], stop: StopRequest | None, may_requeue: bool, *, saved: bool
) -> Decision:
    reason = stop.why if stop else next((record.why for record in records if record.cause == "stop"), "")
    why = f"stopped ({reason or 'on request'}), {'saved' if saved else 'not saved at the stop'}"
    if reason.startswith("standing-notice"):
        why = f"stepped back before the start ({reason})"
    if missing:
        why += f"; no record of {', '.join(missing)}"
    if stop is not None and stop.why == "user" and not stop.requeue:
        return Decision(code=0, cause="stop", why=f"{why}; ends here as {stop.who or 'the user'} asked", requeue=False)
    if stop is not None and not stop.requeue:
        return Decision(code=0, cause="stop", why=f"{why}; no requeue was asked for", requeue=False)
    if not may_requeue:
        why = f"{why}; the job may not be requeued, so it is not complete"
        return Decision(code=NOT_COMPLETE, cause="stop", why=why, requeue=False)
    return Decision(code=REQUEUE, cause="stop", why=why, requeue=True, missing=tuple(missing), saved=saved)


def _lost(records: Sequence[NodeExit], missing: Sequence[str], may_requeue: bool) -> Decision:
    parts = [f"no record of {', '.join(missing)}"] if missing else []
    first = min((record for record in records if record.cause != "done"), key=lambda record: record.time, default=None)
    if first is not None:
        parts.append(f"{first.node}: {first.why or first.cause}")
    killed = not missing and records and all(record.cause in {"signal", "done"} for record in records)
    cause = "signal" if killed else "peer-lost"
    why = "; ".join(parts)
    if may_requeue:
        return Decision(code=REQUEUE, cause=cause, why=why, requeue=True, missing=tuple(missing))
    return Decision(code=LOST, cause=cause, why=f"{why}; the job may not be requeued", requeue=False)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one start of a batch script: which attempt, which job, and what srun returned (for the message)."""

    run: RunDir
    attempt: int
    nonce: str | None
    job_id: str  # as Slurm's commands take it: 9_1 for a task of an array
    may_requeue: bool
    srun_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision as carried out, and by what means a requeue happens: exit-code | scontrol | none."""

    decision: Decision
    means: str


def conclude(ending: Ending) -> Verdict:
    """Decide, write it to the ledger, requeue where needed, and return the verdict to exit with.

    Raises SlurmError where a requeue is due and Slurm refuses it, NotFoundError-like errors for a run without claim.
    """
    try:
        decision = _judge(ending)
    except OSError as error:
        decision = _unreadable(ending, f"{error.filename or ending.run.path}: {error.strerror}")
    except IncompleteError as error:
        decision = _unreadable(ending, f"{error.where}: {error.what}")
    if decision.cause == "fenced":
        return Verdict(decision=decision, means="none")  # the ledger belongs to the newer attempt now
    if not decision.requeue:
        return _write(ending, Verdict(decision=decision, means="none"))
    return _requeue(ending, decision)


def _judge(ending: Ending) -> Decision:
    attempt = ending.run.attempt(ending.attempt)
    claim = _own_claim(ending, attempt)
    if claim is None:
        return _unreadable(ending, f"{attempt.claim} is gone")
    return decide(
        claim,
        _exits(attempt),
        read_stop(attempt),
        attempt=ending.attempt,
        newest_attempt=_newest(ending),
        may_requeue=ending.may_requeue and requeue_wanted(ending.run),
    )


def _unreadable(ending: Ending, why: str) -> Decision:
    """Return the decision where the records do not say: go on, since the next claim holds what cannot go on."""
    why = f"the records cannot be read: {why}"
    return Decision(
        code=REQUEUE if ending.may_requeue else LOST, cause="peer-lost", why=why, requeue=ending.may_requeue
    )


def requeue_wanted(run: RunDir) -> bool:
    """Return `requeue` of RUN/job.toml; true where there is none, or none that can be read: Slurm's flag decides then.

    A requeue must not be lost to a spec written by another version.
    """
    try:
        return bool(spec_fields(run).get("requeue", True))
    except UsageError as error:
        tell(f"pctool decide: {error}")
        return True


def _requeue(ending: Ending, decision: Decision) -> Verdict:
    """Requeue by the one path this cluster has. The fence is looked at once more, right before."""
    claim = _known_claim(ending)
    # where the exit code requeues, going on without Slurm's answer loses nothing; elsewhere it ends the job
    sure = claim is not None and claim.means == "exit-code"
    patience = query.PATIENCE_S if sure else query.LONG_PATIENCE_S
    try:
        job = query.patiently(lambda: query.show_job(ending.job_id), patience=patience)
        codes, _ = query.patiently(query.requeue_exit_codes, patience=patience)
    except SlurmError as error:
        return _blindly(ending, decision, claim, f"Slurm could not be asked: {error.what}")
    refused = _refusal(job)
    if refused is not None:
        return _not_requeued(ending, decision, refused)
    with suppress(OSError):  # what cannot be read has no newer attempt that we know of
        newest = _newest(ending)
        if newest > ending.attempt:
            return Verdict(decision=_fenced(newest), means="none")
    # the ledger first: Slurm may end this script while it waits, and does soon after it has the request
    means = "exit-code" if REQUEUE in codes else "scontrol"
    verdict = _write(ending, Verdict(decision=decision, means=means))
    await_loss(decision.missing)
    if means == "exit-code" or requeue_by_scontrol(ending.job_id):
        return verdict
    return replace(verdict, means="exit-code")  # scontrol did not get through, so the code is all that is left


def _blindly(ending: Ending, decision: Decision, claim: Claim | None, silence: str) -> Verdict:
    """Return the verdict where Slurm does not say anything.

    Exiting with 85 requeues where RequeueExit has it, and giving up would end the job for good everywhere. But 85
    requeues a --no-requeue job as well (seen on 22.05.8), so what the claim knows of that flag counts.
    """
    if claim is not None and claim.requeue is False:
        return _not_requeued(ending, decision, f"{_NO_REQUEUE}; {silence}")
    blind = replace(decision, why=f"{decision.why}; {silence}")
    return _write(ending, Verdict(decision=blind, means="exit-code"))


def _not_requeued(ending: Ending, decision: Decision, why: str) -> Verdict:
    code = NOT_COMPLETE if decision.cause == "stop" else LOST
    final = replace(decision, code=code, requeue=False, why=f"{decision.why}; {why}")
    return _write(ending, Verdict(decision=final, means="none"))


def _known_claim(ending: Ending) -> Claim | None:
    """Return the claim for what it says of the ways to requeue; None where it cannot be read, or is another's."""
    try:
        return _own_claim(ending, ending.run.attempt(ending.attempt))
    except (OSError, IncompleteError, UsageError, FencedError):
        return None


def _refusal(job: JobInfo | None) -> str | None:
    """Return why Slurm would not start this job again, or why it must not be asked to."""
    if job is None:
        return "Slurm does not know this job"
    if not job.requeue:
        return _NO_REQUEUE
    if phase(job.state) in {Phase.ENDED, Phase.COMPLETING}:
        return f"the job is {job.state} already: cancelled, requeued by hand, or out of time"
    return None


def _write(ending: Ending, verdict: Verdict) -> Verdict:
    decision = verdict.decision
    write_down(
        ending.run,
        "decided",
        attempt=ending.attempt,
        code=decision.code,
        cause=decision.cause,
        why=decision.why,
        requeue=verdict.means,
        saved=decision.saved,
        srun_code=ending.srun_code,
    )
    return verdict


def _own_claim(ending: Ending, attempt: AttemptDir) -> Claim | None:
    """Return this start's claim; None where it has been made, as its nonce tells, and is no longer there."""
    claim = read_claim(attempt)
    if claim is None and ending.nonce is not None:
        return None
    if claim is None:
        raise UsageError("this attempt was never claimed", where=str(attempt.path), fix="run `pctool claim` first")
    if ending.nonce is not None and claim.nonce != ending.nonce:
        raise FencedError(
            f"attempt {attempt.number} belongs to job {claim.job_id}, not to this start",
            where=str(attempt.claim),
            fix="end this job: nothing it does is used",
        )
    return claim


def _exits(attempt: AttemptDir) -> Mapping[str, NodeExit]:
    """Return the nodes' records. One that cannot be read is named and counts as none."""
    records: dict[str, NodeExit] = {}
    for path in sorted(attempt.nodes.glob("*.exit")):
        try:
            record = read_node_exit(path)
        except IncompleteError as error:
            tell(f"pctool decide: {error}")
        else:
            records[record.node] = record
    return records


def _newest(ending: Ending) -> int:
    return max(ending.run.attempt_numbers(), default=ending.attempt)


def ending_from(
    environ: Mapping[str, str], *, run_dir: str, attempt: int | None, srun_code: int | None, may_requeue: bool
) -> Ending:
    """Return the ending that claim's exports and Slurm's environment describe. Raise UsageError where they are missing.

    With an attempt given by hand the nonce of the environment is not asked for.
    """
    number = environ.get(env.ATTEMPT) if attempt is None else str(attempt)
    job_id = environ.get("SLURM_JOB_ID")
    if not number or not number.isdigit() or not job_id:
        raise UsageError(
            f"{env.ATTEMPT} or SLURM_JOB_ID is not set",
            fix="`pctool decide` runs in the batch script, after the exports of `pctool claim` were evaluated",
        )
    return Ending(
        run=RunDir(Path(run_dir).absolute()),
        attempt=int(number),
        nonce=environ.get(env.NONCE) if attempt is None else None,
        job_id=task_label(environ) or job_id,
        may_requeue=may_requeue,
        srun_code=srun_code,
    )
