"""Submit a job: check first, make what it needs, hand it to Slurm through submitit, and write down that it was."""

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pctool.errors import IncompleteError, RunInUseError, SlurmError, UsageError
from pctool.job.array import parse_array, task_run_dir
from pctool.job.claim import ended_for_good
from pctool.job.find import jobs_file, submissions, works_elsewhere
from pctool.job.heartbeat import FORGOTTEN_S, last_sign_of_life
from pctool.job.load import load_job, resolve_job
from pctool.job.plan import make_plan, output_path, run_dirs, submitit_folder
from pctool.job.render import run_dir_pattern
from pctool.job.sbatch import UnclearSubmissionError, clean_environment
from pctool.run.layout import AttemptDir, RunDir, write_atomic
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, read_claim
from pctool.slurm import query
from pctool.slurm.states import Phase, is_ended, phase
from pctool.slurm.view import live_view
from pctool.spec.cluster import ClusterView
from pctool.spec.job import JobSpec
from pctool.spec.plan import Plan

if TYPE_CHECKING:
    from pctool.job.submitted import SubmittedJob


def submit(job: JobSpec | str | Path, *, cluster: ClusterView | None = None) -> SubmittedJob:
    """Submit a job and return it as a submitit job whose state works without accounting.

    `job` is a spec, or the path of a job file. The checks are made against `cluster`, or else the cluster at hand.
    Raises UsageError for a job the cluster cannot run, RunInUseError if another job works in its run directory,
    SlurmError if Slurm refuses it; then nothing is left behind.
    """
    spec = resolve_job(job) if isinstance(job, JobSpec) else load_job(job)
    plan = plan_submission(spec, cluster=cluster)
    refuse_run_in_use(plan.spec)
    return execute(plan)


def plan_submission(spec: JobSpec, *, cluster: ClusterView | None = None, dry: bool = False) -> Plan:
    """Return the plan of a submission from here: with the facts of the cluster at hand, or of `cluster`.

    With `dry` a cluster that does not answer is a warning of the plan, not an error.
    """
    check_run_dir(spec)
    view, warnings = cluster, _environment_warnings(os.environ)
    if view is None:
        try:
            view = live_view()
        except SlurmError as error:
            if not dry:
                raise
            warnings.append(f"not checked against a cluster: {error.what}")
    plan = make_plan(spec, view=view, interpreter=sys.executable, user=getpass.getuser())
    return replace(plan, warnings=(*plan.warnings, *warnings))


def _environment_warnings(environ: Mapping[str, str]) -> list[str]:
    ignored = {"SBATCH_IGNORE_PBS"}
    names = sorted(name for name in environ if name.startswith("SBATCH_") and name not in ignored)
    if not names:
        return []
    return [f"sbatch obeys these variables of your environment rather than the script: {', '.join(names)}"]


def check_run_dir(spec: JobSpec) -> None:
    """Raise UsageError unless the run directory is there, or can be made, and may be written to."""
    path = Path(spec.run_dir)
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise UsageError(f"run-dir cannot be made: {there} is not a folder", fix="use another run-dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"run-dir cannot be written: no permission in {there}",
            where=spec.run_dir,
            fix="choose a folder on the shared file system that you may write to",
        )


def refuse_run_in_use(spec: JobSpec) -> None:
    """Raise RunInUseError if a job that is not over works in the run directory, or waits to."""
    refuse_runs_in_use(run_dirs(spec))


def refuse_runs_in_use(runs: Iterable[Path]) -> None:
    """Raise RunInUseError if a job that is not over works in one of these run directories, or waits to."""
    owners = {job_id: run for run in runs for job_id in _owners(RunDir(run))}
    states = query.job_states(sorted(owners))
    for job_id, run in owners.items():
        state = states.get(job_id)
        if state is None or (not is_ended(state) and works_elsewhere(job_id, run)):
            _refuse_if_heard_of(RunDir(run), job_id)
        elif not is_ended(state):
            raise RunInUseError(
                f"job {job_id} ({state}) works in this run directory",
                where=str(run),
                fix=f"wait for it, end it with `{_how_to_end(job_id, state)}`, or give this job another run-dir",
            )


def _refuse_if_heard_of(run: RunDir, job_id: str) -> None:
    """Raise RunInUseError if the job, which the Slurm here does not know, was at work lately: on another cluster."""
    for number in run.attempt_numbers()[-1:]:
        claim = _claim_of(run.attempt(number))
        if claim is None or claim.label != job_id or ended_for_good(run, number):
            return
        silent = time.time() - last_sign_of_life(run.attempt(number), claim)
        if silent <= FORGOTTEN_S:
            raise RunInUseError(
                f"job {job_id} of {claim.cluster or 'another cluster'} was at work in this run directory "
                f"{silent:.0f} s ago, and the Slurm here does not know it",
                where=str(run.path),
                fix=f"end it there, or try again once it has been silent for {FORGOTTEN_S:.0f} s",
            )


def _how_to_end(job_id: str, state: str) -> str:
    return f"pctool stop {job_id}" if phase(state) is Phase.RUNNING else f"scancel {job_id}"


def _owners(run: RunDir) -> Iterator[str]:
    """Yield the ids of the jobs that claimed the newest attempt and that were submitted last."""
    submitted = submissions(run)
    if submitted and submitted[-1].fields.get("job_id"):
        yield str(submitted[-1].fields["job_id"])
    for number in run.attempt_numbers()[-1:]:
        claim = _claim_of(run.attempt(number))
        if claim is not None:
            yield claim.label


def _claim_of(attempt: AttemptDir) -> Claim | None:
    try:
        return read_claim(attempt)
    except IncompleteError:
        return None  # its owner died while writing it; `pctool claim` judges that


@dataclass
class Undo:
    """What was made for a submission, so that a refused one leaves nothing behind."""

    made: list[Path] = field(default_factory=list)
    replaced: dict[Path, bytes] = field(default_factory=dict)

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self.made.append(folder)

    def write(self, path: Path, text: str) -> None:
        """Write a file, and keep what it replaces."""
        if path.exists():
            self.replaced[path] = path.read_bytes()
        else:
            self.made.append(path)
        write_atomic(path, text.encode())

    def undo(self) -> None:
        """Put everything back as it was."""
        for path, data in self.replaced.items():
            write_atomic(path, data)
        for path in reversed(self.made):
            try:
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            except OSError:
                continue  # not empty: somebody else has put something there


@contextmanager
def undone_on_error() -> Iterator[Undo]:
    """Remove what was made if the submission fails, unless Slurm may have the job."""
    undo = Undo()
    try:
        yield undo
    except (UnclearSubmissionError, KeyboardInterrupt):
        raise  # Slurm may have the job, which needs what was made
    except BaseException:
        undo.undo()
        raise


def execute(plan: Plan) -> SubmittedJob:
    """Carry out a plan: folders, files, sbatch, ledger.

    Raises SlurmError if sbatch refuses; then all is as before. Where sbatch gives no answer Slurm may have the job:
    then what it needs stays.
    """
    spec, user = plan.spec, getpass.getuser()
    try:
        with undone_on_error() as undo:
            for folder in plan.directories:
                undo.make_folder(Path(folder))
            for path, text in plan.files.items():
                undo.write(Path(path), text)
            job_id, said = _through_submitit(plan)
    except OSError as error:
        raise UsageError(
            f"cannot write: {error.strerror}",
            where=str(error.filename or spec.run_dir),
            fix="choose a run-dir that you may write to and that has room",
        ) from error
    job = submitted_job(spec, job_id, user)
    told = (note for one in job.array_jobs or (job,) for note in _tell(one))
    job.notes = (*plan.warnings, *said, *remember(job_id, run_dir_pattern(spec)), *told)
    return job


def _tell(job: SubmittedJob) -> tuple[str, ...]:
    """Write to the run's ledger that the job was submitted; return a note if that fails: Slurm has the job."""
    ledger = Ledger(RunDir(Path(job.run_dir)).ledger)
    try:
        ledger.append("submitted", job_id=job.job_id)
    except OSError as error:
        return (f"{ledger.path} cannot be written ({error.strerror}): another job there is refused once this one runs",)
    return ()


def _through_submitit(plan: Plan) -> tuple[str, list[str]]:
    """Submit the plan's script with the plan's command; return the job id and what sbatch said besides."""
    from submitit.core.utils import CommandFunction

    from pctool.job.submitted import Executor

    executor = Executor(
        submitit_folder(plan.spec), script=plan.script, argv=plan.argv, env=clean_environment(os.environ)
    )
    job = executor.submit(CommandFunction(list(plan.spec.command)))
    return str(job.job_id), executor.said


def submitted_job(spec: JobSpec, job_id: str, user: str) -> SubmittedJob:
    """Return the submitit job of a spec that was submitted as `job_id`."""
    from pctool.job.submitted import SubmittedJob

    def job(one_id: str, run_dir: Path, array_jobs: tuple[SubmittedJob, ...] = ()) -> SubmittedJob:
        return SubmittedJob(
            submitit_folder(spec),
            one_id,
            run_dir=run_dir,
            output=output_path(spec, one_id, user),
            array_jobs=array_jobs,
        )

    common = Path(spec.run_dir)
    tasks = parse_array(spec.array) if spec.array else ()
    return job(job_id, common, tuple(job(f"{job_id}_{task}", task_run_dir(common, task)) for task in tasks))


def remember(job_id: str, run_dir: str) -> tuple[str, ...]:
    """Append to the user's list of jobs; return a note if that fails: only verbs on a forgotten job's id need it."""
    path = jobs_file(os.environ)
    line = json.dumps({"job_id": job_id, "run_dir": run_dir}) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line)
    except OSError as error:
        return (f"{path} cannot be written ({error.strerror}): remember the run directory, {run_dir}",)
    return ()
