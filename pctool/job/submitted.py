"""A submitted job as submitit's Job, where accounting may be off: state comes from Slurm's queue and the ledger.

submitit asks sacct, which ParallelCluster does not have by default: its state stays UNKNOWN for ever. Here squeue is
asked, and once Slurm has forgotten the job, the run's ledger.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor, SlurmJob
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher

from pctool.errors import IncompleteError, SlurmError
from pctool.job.sbatch import call_sbatch, job_id_of
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import read_claim
from pctool.slurm import query
from pctool.slurm.parse import JobInfo
from pctool.slurm.states import Phase, is_ended, phase

HOLD_POLLS = 30  # of them to one look for a hold: each task is asked about by itself
POLL_S = 2.0  # how often wait() asks squeue: a submitted job lives for hours, and the controller serves everyone
SILENCE_S = 600.0  # how long Slurm may fail to answer before wait() gives up
FORGOTTEN = "FAILED"  # the state of a job that Slurm has forgotten and whose ledger has no verdict
_TAIL_LINES = 40
_LOG = logging.getLogger("pctool")


class Executor(SlurmExecutor):
    """submitit's executor, with our script as the text of the submission and the plan's command to submit it."""

    def __init__(self, folder: Path, *, script: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.said: list[str] = []
        self._script = script
        self._argv = tuple(argv)
        self._env = dict(env)

    @classmethod
    def affinity(cls) -> int:
        """Return that this executor can be used; sbatch says it better if it cannot."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        return [self._submit(delayed) for delayed in delayed_submissions]

    def _submit(self, delayed: DelayedSubmission) -> SubmittedJob:
        path = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        try:
            path.write_text(self._script)
            job = self._submit_command(str(path))
            self._keep(job, path, delayed)
        finally:
            path.unlink(missing_ok=True)
        return job

    def _submit_command(self, command: str) -> SubmittedJob:
        """Submit the script at path `command`."""
        job_id, self.said = call_sbatch(self._make_submission_command(Path(command)), env=self._env)
        return SubmittedJob(self.folder, job_id)

    def _keep(self, job: SubmittedJob, script: Path, delayed: DelayedSubmission) -> None:
        """Leave submitit's files of a job. Slurm has it by now: a full disk is no reason to call it refused."""
        try:
            job.paths.move_temporary_file(script, "submission_file")
            delayed.dump(job.paths.submitted_pickle)
        except OSError as error:
            self.said.append(f"submitit's files of job {job.job_id} cannot be written: {error.strerror}")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self._argv, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return job_id_of(string.decode() if isinstance(string, bytes) else string)


class _NoSacct(SlurmInfoWatcher):
    """Keep submitit from calling sacct by another way in, such as its cancel-at-deletion."""

    def update(self) -> None:
        """Ask squeue, and the ledger for what squeue no longer has."""
        states = query.job_states(sorted(self._registered - self._finished))
        for job_id, state in states.items():
            self._info_dict[job_id] = {"JobID": job_id, "State": state}
            if is_ended(state):
                self._finished.add(job_id)
        self._last_status_check = time.time()


class SubmittedJob(SlurmJob[Path]):
    """One submitted job, or one task of an array. `result()` waits and returns the run directory."""

    watcher = _NoSacct(delay_s=60)

    def __init__(
        self,
        folder: str | Path,
        job_id: str,
        tasks: Sequence[int] = (0,),
        *,
        run_dir: str | Path = "",
        output: str | Path = "",
        array_jobs: Sequence[SubmittedJob] = (),
    ) -> None:
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)
        self.run_dir = str(run_dir)
        self.output = str(output)  # path of the job's standard output
        self.array_jobs = tuple(array_jobs)
        self.notes: tuple[str, ...] = ()  # warnings of the plan, and what sbatch said besides the id
        self._final: str | None = None
        self._told_hold = False

    @property
    def state(self) -> str:
        """Return the job's state in Slurm's words; for an array, that of the first task that is not over.

        Raises SlurmError when Slurm does not answer.
        """
        states = _states(self.array_jobs or (self,))
        alive = [state for state in states if not is_ended(state)]
        failed = [state for state in states if state != "COMPLETED"]
        return next(iter(alive or failed), "COMPLETED")

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job is over for good: a job that waits for its next attempt is not."""
        return is_ended(self.state)

    def wait(self) -> None:
        """Return when the job is over, however often it is requeued; a hold is logged, since only its owner can end it.

        Raises SlurmError if Slurm is silent for long.
        """
        silent_since: float | None = None
        for poll in itertools.count():
            try:
                if self.done():
                    return
                if poll % HOLD_POLLS == 0:
                    self._tell_holds()
                silent_since = None
            except SlurmError:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > SILENCE_S:
                    raise
            time.sleep(POLL_S)

    def _tell_holds(self) -> None:
        """Log once a hold why Slurm holds the job, or a task of it."""
        for one in self.array_jobs or (self,):
            job = query.show_job(one.job_id) if one._final is None else None
            held = job is not None and job.held and phase(job.state) is Phase.PENDING
            if held and not one._told_hold:
                events = Ledger(RunDir(Path(one.run_dir)).ledger).read()
                why = [event.fields.get("why") for event in events if event.event == "held"] or ["by its owner"]
                _LOG.warning("job %s is held: %s; `pctool status %s` tells what to do", one.job_id, why[-1], one.job_id)
            one._told_hold = held

    def results(self) -> list[Path]:
        """Wait, and return the run directory (of each task of an array); raise the job's exception if it failed."""
        error = self.exception()
        if error is not None:
            raise error
        return [Path(job.run_dir) for job in self.array_jobs or (self,)]

    def result(self) -> Path:
        """Wait, and return the run directory; raise submitit's FailedJobError if the job did not complete."""
        return self.results()[0]

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """Wait, and return why the job did not complete, or None."""
        self.wait()
        errors = [job.exception() for job in self.array_jobs]
        if errors or self.state == "COMPLETED":
            return next((error for error in errors if error is not None), None)
        return FailedJobError(f"job {self.job_id} ended {self.state}: {self._why()}\n{self._tail()}")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return what scontrol tells of the job; {} once Slurm has forgotten it."""
        job: JobInfo | None = query.show_job(self.job_id)
        return dict(job.fields) if job else {}

    @property
    def paths(self) -> JobPaths:
        """Return submitit's paths; standard output and error are one file, the job's --output."""
        return _Paths(self._paths, self.output) if self.output else self._paths

    def _why(self) -> str:
        run = RunDir(Path(self.run_dir))
        events = Ledger(run.ledger).read()
        verdict = _verdict(run, events, self.job_id)
        if verdict is not None:
            return f"{verdict.fields.get('why') or verdict.fields.get('cause')}"
        held = [event.fields.get("why") for event in events if event.event == "held"]
        if held:
            return str(held[-1])
        job = query.show_job(self.job_id)
        return f"exit code {job.exit_code}" if job else "the ledger has no verdict: cancelled, or its node failed"

    def _tail(self) -> str:
        try:
            lines = Path(self.output).read_text(errors="replace").splitlines()
        except OSError as error:
            return f"its output {self.output} cannot be read: {error.strerror}"
        return "\n".join([f"the end of {self.output}:", *lines[-_TAIL_LINES:]])


def _states(jobs: Sequence[SubmittedJob]) -> list[str]:
    """Return the jobs' states with one call of squeue at most; a final state is kept, Slurm soon forgets it."""
    asked = [job.job_id for job in jobs if job._final is None]
    known = query.job_states(asked)
    states = []
    for job in jobs:
        state = job._final or known.get(job.job_id)
        if state is None:
            state = _from_ledger(RunDir(Path(job.run_dir)), job.job_id)
        job._final = state if is_ended(state) else None
        states.append(state)
    return states


class _Paths(JobPaths):
    def __init__(self, paths: JobPaths, output: str) -> None:
        super().__init__(paths._folder, job_id=paths.job_id, task_id=paths.task_id)
        self._output = Path(output)

    @property
    def stdout(self) -> Path:
        return self._output

    @property
    def stderr(self) -> Path:
        return self._output


def _from_ledger(run: RunDir, job_id: str) -> str:
    """Return the final state of a job that Slurm has forgotten, by what its batch script decided last."""
    verdict = _verdict(run, Ledger(run.ledger).read(), job_id)
    if verdict is None or verdict.fields.get("requeue") != "none":
        return FORGOTTEN
    return "COMPLETED" if verdict.fields.get("code") == 0 else "FAILED"


def _verdict(run: RunDir, events: Sequence[Event], job_id: str) -> Event | None:
    """Return the `decided` event of the newest attempt of this job that has one."""
    claims = [event for event in events if event.event == "claim"]
    attempts = {event.attempt for event in claims if _is_same(run, event, job_id)}
    verdicts = [event for event in events if event.event == "decided" and event.attempt in attempts]
    return verdicts[-1] if verdicts else None


def _is_same(run: RunDir, event: Event, job_id: str) -> bool:
    """Return whether the claim is this job's; a task of an array claims by an id of its own and says which it is."""
    if "_" not in job_id or event.attempt is None:
        return event.fields.get("job_id") == job_id
    try:
        claim = read_claim(run.attempt(event.attempt))
    except IncompleteError:
        return False
    return claim is not None and claim.label == job_id
