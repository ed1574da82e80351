"""Submit a batch script as it stands, and write down in a run directory what was submitted, how, and as which job."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pctool.errors import SlurmError, UsageError
from pctool.job.array import parse_array
from pctool.job.sbatch import call_sbatch, clean_environment
from pctool.job.submit import refuse_runs_in_use, remember, undone_on_error
from pctool.run.layout import RunDir, write_atomic
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.comment import parse_comment
from pctool.spec.plan import BatchPlan

FOLDER = "runs"  # below the folder of the submission, as for a job of pctool's own
COPY = "script.sh"  # in the run directory: Slurm keeps its copy only while it knows the job
_ODD = re.compile(r"[^\w.+=@-]+")
_NO_JOB = ("test-only", "help", "usage", "version")  # sbatch prints something and submits nothing
_TASK = "%a"


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch script that was submitted. `output` is None where Slurm did not say it."""

    job_id: str
    run_dir: str
    output: str | None
    notes: tuple[str, ...] = ()


def plan_batch(
    script: str,
    text: bytes,
    *,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    effective: Mapping[str, str],
    run_dir: str | None = None,
    warnings: Sequence[str] = (),
) -> BatchPlan:
    """Return the submission of a script as it stands; starts nothing.

    `options` stand before the script on sbatch's command line, `arguments` behind it. `effective` are the options that
    sbatch will obey, wherever they were given, by long name. Raises UsageError for what is no submission of a job
    (--test-only), or would not return once the job is submitted (--wait).
    """
    _refuse(effective)
    runs, pattern = _run_dirs(run_dir, effective)
    return BatchPlan(
        script=script,
        text=text,
        name=_ODD.sub("-", effective.get("job-name") or os.path.basename(script)).strip("-.") or "job",
        argv=("sbatch", "--parsable", *options, script, *arguments),
        folder=os.path.join(os.getcwd(), FOLDER),
        run_dirs=runs,
        remember=pattern,
        warnings=tuple(warnings),
    )


def _refuse(given: Container[str]) -> None:
    for name in _NO_JOB:
        if name in given:
            raise UsageError(f"--{name} submits no job", fix="call sbatch itself for that")
    if "wait" in given:
        raise UsageError(
            "--wait: the job would be written down only once it is over",
            fix="leave it out and follow the job with `pctool logs -f`, or call sbatch itself",
        )


def _run_dirs(asked: str | None, options: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the run directories and how the list of jobs has them: that of --run-dir, or of pctool's own comment."""
    comment = parse_comment(options.get("comment"))
    if comment is None:
        path = os.path.abspath(asked) if asked else ""
        return ((path,) if path else ()), path
    if asked and os.path.abspath(asked) != comment.run_dir:
        raise UsageError(
            f"the script works in the run directory {comment.run_dir}, not in {asked}",
            fix="leave out --run-dir, or render the script anew with another one",
        )
    tasks = parse_array(options["array"]) if "array" in options and _TASK in comment.run_dir else (0,)
    return tuple(comment.run_dir.replace(_TASK, str(task)) for task in tasks), comment.run_dir


def execute_batch(plan: BatchPlan) -> BatchJob:
    """Hand the script to sbatch and write the ledger.

    Raises RunInUseError if a job works in the run directory, SlurmError if sbatch refuses: then all is as before.
    What cannot be written once Slurm has the job is told in the notes.
    """
    refuse_runs_in_use(Path(run) for run in plan.run_dirs)
    try:
        with undone_on_error() as undo:
            for folder in plan.run_dirs or (plan.folder,):
                undo.make_folder(Path(folder))
            job_id, said = call_sbatch(plan.argv, env=clean_environment(os.environ))
    except OSError as error:
        raise UsageError(
            f"cannot be made: {error.strerror}",
            where=str(error.filename or plan.folder),
            fix="submit from a folder that you may write to, or name one with --run-dir",
        ) from error
    runs = plan.run_dirs or (os.path.join(plan.folder, f"{plan.name}-{job_id}"),)
    output, unknown = _output(job_id)
    notes = [*plan.warnings, *said, *unknown]
    for run in runs:
        notes += _write_down(plan, Path(run), job_id, output)
    notes += remember(job_id, plan.remember or runs[0])
    return BatchJob(job_id=job_id, run_dir=plan.remember or runs[0], output=output, notes=tuple(notes))


def _output(job_id: str) -> tuple[str | None, list[str]]:
    """Return the file of the job's output as Slurm has it, patterns left in where a task fills them in."""
    try:
        job = query.show_job(job_id)
    except SlurmError as error:
        return None, [f"where the job's output goes is not known: {error.what}"]
    return (job.std_out if job else None), []


def _write_down(plan: BatchPlan, run: Path, job_id: str, output: str | None) -> list[str]:
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_atomic(run / COPY, plan.text)
        Ledger(RunDir(run).ledger).append(
            "submitted",
            job_id=job_id,
            script=os.path.abspath(plan.script),
            sha256=hashlib.sha256(plan.text).hexdigest(),
            argv=list(plan.argv),
            output=output,
        )
    except OSError as error:
        return [f"job {job_id} is submitted, but {run} cannot be written: {error.strerror}"]
    return []
