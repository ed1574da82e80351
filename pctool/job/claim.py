"""Claim the next attempt of a run: once a start of the batch script, exclusively, and only if it is safe to go on.

The attempt's folder is made under another name with claim.json inside and then renamed to its number. A rename to a
folder that is not empty fails, so that one claimant wins a number, and nobody ever sees a number without its claim.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pctool.checkpoint.foreign import ForeignCheckpointError
from pctool.checkpoint.lineage import BelowDurableError, ResumePoint, find_resume, newest_attempt
from pctool.checkpoint.stores import StoreUnreadableError
from pctool.errors import (
    REQUEUE,
    AwsError,
    IncompleteError,
    PctoolError,
    RunInUseError,
    SlurmError,
    UsageError,
)
from pctool.job.array import task_label
from pctool.job.find import works_elsewhere
from pctool.job.heartbeat import FORGOTTEN_S, SILENT_S, last_sign_of_life, read_heartbeat
from pctool.job.hold import Held, hold, note, tell
from pctool.job.stalled import MAX_STEP_BACKS, count_stalled, why_stalled
from pctool.run import env
from pctool.run.layout import AttemptDir, RunDir, fsync_dir, write_atomic
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes, read_claim
from pctool.slurm import query
from pctool.slurm.states import is_ended

_RACES = 1000  # claimants that may be faster than this one before it gives up


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a batch script, as Slurm's environment describes it."""

    run: RunDir
    job_id: str
    restart: int
    node: str  # SLURMD_NODENAME
    nodelist: str
    cluster: str  # SLURM_CLUSTER_NAME, with the controller behind it once Slurm was asked
    store: str | None
    max_stalled: int
    task: str = ""  # 9_1, for a task of an array

    @property
    def label(self) -> str:
        """Return the id as Slurm's commands take it: 123, or 123_4 for a task of an array."""
        return self.task or self.job_id


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """The attempt is ours."""

    run: RunDir
    attempt: int
    claim: Claim
    resume: ResumePoint | None

    def exports(self) -> str:
        """Return the `export NAME=value` lines for the batch script, quoted for the shell."""
        values = {
            env.RUN_DIR: str(self.run.path),
            env.ATTEMPT: str(self.attempt),
            env.NONCE: self.claim.nonce,
            env.HUB: self.claim.hub,
        }
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def claim_attempt(start: Start) -> Claimed | Held:
    """Claim the next attempt for this start, or hold the job and say why.

    Raises RunInUseError naming the job that holds the run, SlurmError if Slurm refuses what is needed, UsageError if
    the run directory cannot be made.
    """
    try:
        return _claim(start)
    except OSError as error:
        # a full disk, most of all: a job that ends for it is gone, one that is held goes on once it is released
        why = f"{error.filename or start.run.path}: {error.strerror}"
        return hold(start.run, job_id=start.label, rule="run-unwritable", why=why, attempt=None)
    except IncompleteError as error:
        why = f"{error.where}: {error.what}"
        return hold(start.run, job_id=start.label, rule="claim-unreadable", why=why, attempt=None)


def _claim(start: Start) -> Claimed | Held:
    lost = _lost_run(start)
    if lost is not None:
        return hold(start.run, job_id=start.label, rule="run-missing", why=lost, attempt=None)
    _prepare(start)
    ways = _ask_ways(start)
    start = replace(start, cluster=ways.cluster)
    _check_owner(start, _newest(start.run))
    checked = _may_go_on(start)
    if isinstance(checked, Held):
        return checked
    try:
        nodes = query.patiently(lambda: query.hostnames(start.nodelist)) or (start.node,)
    except SlurmError as error:
        return _hold(start, "slurm-silent", f"the job's nodes cannot be found out: {error.what}")
    claim = Claim(
        job_id=start.job_id,
        restart=start.restart,
        nonce=secrets.token_hex(16),
        host=start.node,
        nodes=nodes,
        time=round(time.time(), 3),
        hub=_hub(start.node),
        cluster=start.cluster,
        task=start.task,
        means=ways.means,
        requeue=ways.requeue,
    )
    attempt = take(start, claim, above=checked.newest)
    Ledger(start.run.ledger).append(
        "claim", attempt=attempt, job_id=claim.job_id, restart=claim.restart, nodes=list(nodes), host=claim.host
    )
    note(start.run, start.label, "")  # a note of an earlier hold is no longer true
    return Claimed(run=start.run, attempt=attempt, claim=claim, resume=checked.resume)


@dataclass(frozen=True)
class _Ways:
    """Which cluster this is, and the ways to requeue there, as far as Slurm says."""

    cluster: str
    means: str = ""
    requeue: bool | None = None


def _ask_ways(start: Start) -> _Ways:
    """Return what decide needs to know should Slurm be silent at the end; less where it is silent now.

    ParallelCluster names every cluster alike (`parallelcluster`), so the controller's name makes it unique.
    """
    try:
        settings, job = query.patiently(lambda: (query.config(), query.show_job(start.label)))
    except SlurmError as error:
        tell(f"pctool claim: Slurm could not be asked how it requeues: {error.what}")
        return _Ways(start.cluster)
    codes, _ = query.requeue_exit_codes(settings)
    name, controller = settings.get("ClusterName") or start.cluster, settings.get("SlurmctldHost[0]")
    return _Ways(
        cluster=f"{name}@{controller}" if name and controller else name,
        means="exit-code" if REQUEUE in codes else "scontrol",
        requeue=job.requeue if job else None,
    )


def take(start: Start, claim: Claim, *, above: int = -1) -> int:
    """Make the next attempt's folder and return its number; whoever was faster is asked about like any owner.

    It is greater than `above` too: a store may have checkpoints of attempts whose run directory is gone.
    """
    number = max(_newest(start.run), above)
    for _ in range(_RACES):
        attempt = start.run.attempt(number + 1)
        if publish(attempt, claim):
            start.run.logs(attempt.number).mkdir(parents=True, exist_ok=True)
            return attempt.number
        # a listing may be older than what rename just saw (NFS), so go by the number that is taken
        number = max(attempt.number, _newest(start.run))
        _check_owner(start, number)
    raise SlurmError(f"{_RACES} other claims were faster", where=str(start.run.attempts), fix="see who starts so many")


def publish(attempt: AttemptDir, claim: Claim) -> bool:
    """Return whether this claim now owns the attempt's number. Our own nonce there is our own lost answer (NFS)."""
    temp = attempt.path.with_name(f".claim-{claim.nonce}")
    if attempt.path.exists():
        return _is_mine(attempt, claim)
    (temp / "nodes").mkdir(parents=True, exist_ok=True)
    write_atomic(temp / "claim.json", claim_bytes(claim))
    try:
        os.rename(temp, attempt.path)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT}:
            raise
        shutil.rmtree(temp, ignore_errors=True)
        return _is_mine(attempt, claim)
    fsync_dir(attempt.path.parent)
    return True


def _is_mine(attempt: AttemptDir, claim: Claim) -> bool:
    owner = read_claim(attempt)
    return owner is not None and owner.nonce == claim.nonce


@dataclass(frozen=True)
class _GoOn:
    resume: ResumePoint | None
    newest: int  # attempt, of the run directory and of all checkpoints


def _may_go_on(start: Start) -> _GoOn | Held:
    """Check that attempts make progress and that the next one would resume where the run really is."""
    events = Ledger(start.run.ledger).read()
    numbers = start.run.attempt_numbers()
    why = why_stalled(count_stalled(events, numbers, heard=_heard(start, numbers)), start.max_stalled)
    if why is not None:
        return _hold(start, "stalled", why)
    try:
        return _GoOn(find_resume(start.run, start.store), newest_attempt(start.run, start.store))
    except BelowDurableError as error:
        return _hold(start, "below-durable", error.what)
    except ForeignCheckpointError as error:
        return _hold(start, "foreign-checkpoints", error.what)
    except (OSError, AwsError, StoreUnreadableError) as error:
        said = error.what if isinstance(error, PctoolError) else str(error)
        return _hold(start, "store-unreadable", f"the checkpoints cannot be listed: {said}")


def _heard(start: Start, numbers: Sequence[int]) -> dict[int, float]:
    """Return when the attempts were last heard of; only of those that may decide whether the run is stalled."""
    newest = numbers[-(max(start.max_stalled, 0) + MAX_STEP_BACKS) :]
    beats = {number: read_heartbeat(start.run.attempt(number)) for number in newest}
    return {number: beat.time for number, beat in beats.items() if beat}


def _hold(start: Start, rule: str, why: str) -> Held:
    newest = _newest(start.run)
    return hold(start.run, job_id=start.label, rule=rule, why=why, attempt=newest if newest >= 0 else None)


def _lost_run(start: Start) -> str | None:
    """Return why this cannot be the run that was started before, or None."""
    if start.run.ledger.exists():
        return None
    if start.restart > 0:
        return f"this is restart {start.restart}, but {start.run.ledger} is not there: is the file system mounted?"
    if start.run.attempts.is_dir() and start.run.attempt_numbers():
        return f"{start.run.path} has attempts but no ledger.jsonl"
    return None


def _prepare(start: Start) -> None:
    """Make the run's folders. Raise UsageError where a new run cannot be made, OSError where one is there already."""
    run = start.run
    try:
        for folder in (run.attempts, run.checkpoints, run.path / "logs"):
            _make_folder(folder)
    except OSError as error:
        if not _is_new(start):
            raise
        raise UsageError(
            f"the run directory cannot be made: {error.strerror}",
            where=str(run.path),
            fix="choose a folder on the shared file system that you may write to (--run-dir)",
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        why = "is there, but leads to no folder (is its file system mounted?)"
        raise NotADirectoryError(error.errno, why, str(folder)) from error


def _is_new(start: Start) -> bool:
    """Return whether nothing can be lost by refusing this start; where the file system does not say, something can."""
    try:
        return start.restart == 0 and not start.run.attempt_numbers()
    except NotADirectoryError:
        return start.restart == 0


def _newest(run: RunDir) -> int:
    return max(run.attempt_numbers(), default=-1)


def _check_owner(start: Start, newest: int) -> None:
    """Raise RunInUseError unless the newest claim's owner is this job or is gone."""
    for number in range(newest, -1, -1):
        attempt = start.run.attempt(number)
        owner = read_claim(attempt)
        if owner is not None:
            _check_gone(start, attempt, owner)
            return


def _check_gone(start: Start, attempt: AttemptDir, owner: Claim) -> None:
    here = _same_cluster(owner.cluster, start.cluster)
    if here and owner.job_id == start.job_id:
        return
    if not here:
        _check_silent(start, attempt, owner, f"it belongs to another cluster ({owner.cluster})")
        return
    try:
        state = query.patiently(lambda: _state_of(owner, start.run))
    except SlurmError as error:
        _check_silent(start, attempt, owner, error.what)
        return
    if state is None:
        # its job has ended long ago; or it lives on another cluster of the same name, where that is all we know
        _check_silent(start, attempt, owner, "the Slurm here does not know its job", silence=FORGOTTEN_S)
    elif not is_ended(state):
        raise _in_use(start, attempt, owner, f"which is {state}")


def _state_of(owner: Claim, run: RunDir) -> str | None:
    """Return the state of the owner's job; None where Slurm does not know it, or knows another one of that id."""
    state = query.job_states([owner.label]).get(owner.label)
    return None if state is None or works_elsewhere(owner.label, run.path) else state


def _same_cluster(one: str, other: str) -> bool:
    """Return whether two claims are of one cluster, as far as is known: what is missing on either side fits anything.

    The controller is missing where Slurm was silent at the claim.
    """
    (name, _, controller), (other_name, _, other_controller) = one.partition("@"), other.partition("@")
    return all(not a or not b or a == b for a, b in ((name, other_name), (controller, other_controller)))


def _check_silent(start: Start, attempt: AttemptDir, owner: Claim, reason: str, *, silence: float = SILENT_S) -> None:
    if ended_for_good(start.run, attempt.number):
        return
    silent = time.time() - last_sign_of_life(attempt, owner)
    if silent <= silence:
        said = f"heard {silent:.0f} s ago; Slurm cannot tell whether it is gone: {reason}"
        raise _in_use(start, attempt, owner, f"{said}; it counts as gone after {silence:.0f} s of silence")


def ended_for_good(run: RunDir, attempt: int) -> bool:
    """Return whether the attempt ended in an orderly way and without a requeue."""
    decided = [event for event in Ledger(run.ledger).read() if event.event == "decided" and event.attempt == attempt]
    return bool(decided) and decided[-1].fields.get("requeue") == "none"


def _in_use(start: Start, attempt: AttemptDir, owner: Claim, what: str) -> RunInUseError:
    return RunInUseError(
        f"this run is held by job {owner.label} (attempt {attempt.number} on {owner.host}), {what}",
        where=str(start.run.path),
        fix=f"wait for it, end it with `scancel {owner.label}`, or give this job a run directory of its own",
    )


def _hub(node: str) -> str:
    """Return host:port where the launches of this attempt meet: an address that other nodes reach, a port free now.

    The port may be taken until launch binds it; then launch moves on to the next ones.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return f"{_address(node)}:{port}"


def _address(node: str) -> str:
    """Return NodeAddr as Slurm has it, or this host's name where Slurm does not answer or the name means nothing."""
    try:
        addr = query.node_addr(node)
        if addr:
            socket.getaddrinfo(addr, None)
            return addr
    except (SlurmError, OSError):
        pass
    return socket.gethostname()


def start_from(environ: Mapping[str, str], *, run_dir: str, store: str | None, max_stalled: int) -> Start:
    """Return the start that Slurm's environment describes. Raise UsageError outside a batch script."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise UsageError("SLURM_JOB_ID is not set", fix="`pctool claim` is for the batch script; use `pctool submit`")
    return Start(
        run=RunDir(Path(run_dir).absolute()),
        job_id=job_id,
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        nodelist=environ.get("SLURM_JOB_NODELIST", ""),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        store=store,
        max_stalled=max_stalled,
        task=task_label(environ),
    )
