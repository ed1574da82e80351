"""From what a user types, a job id or a path, to the run directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pctool.errors import IncompleteError, NotFoundError, SlurmError, UsageError
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import Claim, read_claim
from pctool.slurm import query
from pctool.slurm.comment import parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, is_ended, phase

_JOB_ID = re.compile(r"^(\d+)(?:_(\d+))?$")
_TASK = "%a"
_CLOCKS_S = 3700.0  # how far the clocks of two machines are apart at most, and the hour that daylight saving repeats


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run, the job that works on it (or did last), and what Slurm knows of that job."""

    run: RunDir
    job_id: str | None = None
    job: JobInfo | None = None
    slurm_silent: str | None = None  # why Slurm could not be asked
    successor_of: str | None = None  # the job asked for, where Slurm has forgotten it and `job` took on its run

    @property
    def alive(self) -> bool:
        """Return whether the job runs now; not known where Slurm is silent, which counts as alive."""
        if self.job is None:
            return self.slurm_silent is not None
        return phase(self.job.state) in {Phase.RUNNING, Phase.COMPLETING}


def jobs_file(environ: Mapping[str, str]) -> Path:
    """Return the file in which submit remembers job ids, for when Slurm has forgotten them."""
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local" / "state")
    return Path(state) / "pctool" / "jobs.jsonl"


def find_run(target: str, *, jobs: Path) -> Found:
    """Return the run that a job id (123, 123_4) or a path names.

    A job id is looked up in Slurm (the job's comment) and then in `jobs`. Raises NotFoundError if neither knows it or
    there is no run at that path, UsageError for a whole array.
    """
    match = _JOB_ID.match(target)
    if match and not Path(target).is_dir():
        return _by_job(target, match[1], match[2], jobs)
    return _by_path(Path(target).absolute())


def is_alive(found: Found, silent: Callable[[SlurmError], None] | None = None) -> bool:
    """Ask Slurm whether the run's newest job may still run, now or after a requeue.

    Silence counts as alive, and is told to `silent`.
    """
    job_id = last_job_id(found.run) or found.job_id
    if job_id is None:
        return False
    try:
        state = query.job_states([job_id]).get(job_id)
    except SlurmError as error:
        if silent is not None:
            silent(error)
        return True
    return state is not None and not is_ended(state)


def _by_path(path: Path) -> Found:
    run = RunDir(path)
    if not run.ledger.exists() and not run.attempts.is_dir() and not run.job_toml.exists():
        raise NotFoundError("no run directory here", where=str(path), fix="give a job id, or the run directory itself")
    return _last_of(run)


def at_work(found: Found) -> Found:
    """Return the run with the job that claimed it last, which need not be the one that was asked for."""
    newest = last_job_id(found.run)
    if newest is None or found.slurm_silent or (found.job and newest in (found.job.job_id, found.job.label)):
        return found
    return _last_of(found.run)


def _last_of(run: RunDir) -> Found:
    job_id = last_job_id(run)
    if job_id is None:
        return Found(run=run)
    job, silent = _ask(job_id)
    ours = job is not None and _is_ours(job, run)
    return Found(run=run, job_id=job_id, job=job if ours else None, slurm_silent=silent)


def _by_job(target: str, base: str, task: str | None, jobs: Path) -> Found:
    job, silent = _ask(target)
    comment = parse_comment(job.comment) if job else None
    if job is not None and comment is None:
        return _without_comment(target, base, job, jobs)
    if job is not None and comment is not None:
        task = task or job.array_task_id
        named = _for_task(comment.run_dir, target, task) if job.array_job_id else comment.run_dir
        return Found(run=RunDir(Path(named)), job_id=job.job_id, job=job)
    remembered = _remembered(jobs, (target, base))
    if remembered is None:
        why = silent or "Slurm does not know it (any more)"
        raise NotFoundError(
            f"job {target} is not found: {why}, and {jobs} does not have it", fix="give the run directory itself"
        )
    run = RunDir(Path(_for_task(remembered, target, task)))
    if not run.path.is_dir():
        raise NotFoundError(
            f"the run directory of job {target} is not there (any more); {silent or 'Slurm does not know the job'}",
            where=str(run.path),
            fix="give the run directory itself, if it was moved",
        )
    if silent:
        return Found(run=run, job_id=last_job_id(run) or target, slurm_silent=silent)
    found = _last_of(run)
    return replace(found, job_id=found.job_id or target, successor_of=target if found.job else None)


def _without_comment(target: str, base: str, job: JobInfo, jobs: Path) -> Found:
    """Return the run of a batch script that was submitted as it stands: its job has no comment of ours."""
    remembered = _remembered(jobs, (target, base))
    if remembered is None or not _was_submitted(RunDir(Path(remembered)), base, job):
        raise NotFoundError(f"job {target} is not one of pctool's", fix="give the run directory, or another job id")
    return Found(run=RunDir(Path(remembered)), job_id=job.job_id, job=job)


def _was_submitted(run: RunDir, job_id: str, job: JobInfo) -> bool:
    """Return whether the ledger has this very job: a cluster that is set up anew gives the same ids again."""
    times = [event.time for event in submissions(run) if event.fields.get("job_id") == job_id]
    return any(job.submit_time is None or abs(job.submit_time - time) <= _CLOCKS_S for time in times)


def submissions(run: RunDir) -> list[Event]:
    """Return the submissions that the run's ledger knows, oldest first."""
    return [event for event in Ledger(run.ledger).read() if event.event == "submitted"]


def _ask(job_id: str) -> tuple[JobInfo | None, str | None]:
    try:
        return query.show_job(job_id), None
    except SlurmError as error:
        return None, error.what


def works_elsewhere(job_id: str, path: Path) -> bool:
    """Return whether the job of that id works on another run: a cluster that is set up anew counts from 1 again.

    Raises SlurmError if Slurm does not answer.
    """
    job = query.show_job(job_id)
    return job is not None and parse_comment(job.comment) is not None and not _is_run(job, path)


def _is_ours(job: JobInfo, run: RunDir) -> bool:
    """Return whether the job of the newest claim's id is the one that claimed.

    Its comment tells, unless it has one of its own. Then its restarts and its start do: another cluster gives ids anew.
    """
    if parse_comment(job.comment) is not None:
        return _is_run(job, run.path)
    claim = _newest_claim(run)
    if claim is None or claim.job_id != job.job_id or claim.restart < job.restarts:
        return True
    return claim.restart == job.restarts and (job.start_time is None or job.start_time <= claim.time + _CLOCKS_S)


def _is_run(job: JobInfo, path: Path) -> bool:
    """Return whether the job works on this run: job ids are given anew by another cluster."""
    given = run_of(job)
    return given is not None and (given.path == path or _same(given.path, path))


def run_of(job: JobInfo) -> RunDir | None:
    """Return the run that the job's comment names; None for a job that is not pctool's."""
    comment = parse_comment(job.comment)
    return RunDir(Path(comment.run_dir.replace(_TASK, job.array_task_id or _TASK))) if comment else None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _for_task(run_dir: str, target: str, task: str | None) -> str:
    if _TASK not in run_dir:
        return run_dir
    if task is None or not task.isdigit():
        raise UsageError(f"{target} is an array", fix=f"name one task, as in {target}_0")
    return run_dir.replace(_TASK, task)


def _remembered(jobs: Path, ids: Iterable[str]) -> str | None:
    """Return the newest run directory that submit wrote down for one of these ids."""
    wanted = set(ids)
    return next((run_dir for job_id, run_dir in reversed(list(_records(jobs))) if job_id in wanted), None)


def remembered_ids(jobs: Path) -> set[str]:
    """Return the ids of all jobs that submit wrote down, those of batch scripts without a comment of ours too."""
    return {job_id for job_id, _ in _records(jobs)}


def _records(jobs: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = jobs.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
            yield str(record["job_id"]), str(record["run_dir"])
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a full disk hides one job, not the others


def last_job_id(run: RunDir) -> str | None:
    """Return the id of the job that works on the run, or did last; None if there is none.

    That is the one that claimed the newest attempt, unless another was submitted since, which has yet to start.
    """
    claim = _newest_claim(run)
    submitted = submissions(run)
    if submitted and (claim is None or submitted[-1].time > claim.time):
        return str(submitted[-1].fields.get("job_id"))
    return claim.job_id if claim else None


def _newest_claim(run: RunDir) -> Claim | None:
    for number in reversed(run.attempt_numbers()):
        try:
            claim = read_claim(run.attempt(number))
        except IncompleteError:
            continue
        if claim is not None:
            return claim
    return None
