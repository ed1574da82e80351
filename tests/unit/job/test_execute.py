"""What is left of a submission that went wrong: nothing where Slurm refused it, all where Slurm may have the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pctool.errors import RunInUseError, SlurmError, UsageError
from pctool.job import sbatch as sbatch_door
from pctool.job import submitted
from pctool.job.plan import make_plan
from pctool.job.sbatch import UnclearSubmissionError
from pctool.job.submit import execute, refuse_run_in_use
from pctool.job.submitted import SubmittedJob
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.slurm import query
from pctool.spec.job import JobSpec

SILENT = "sleep 60"
GARBLED = "echo Submitted"
LATE = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
REFUSED = "echo 'sbatch: error: no' >&2; exit 1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sbatch_door, "SBATCH_TIMEOUT_S", 0.5)
    (tmp_path / "train.py").write_text("")
    return RunDir(tmp_path / "run")


def submit(run: RunDir, sbatch: str) -> SubmittedJob:
    """Carry out a plan where `sbatch` does what the shell text says."""
    program = run.path.parent / "sbatch"
    program.write_text(f"#!/bin/bash\n{sbatch}\n")
    program.chmod(0o755)
    spec = JobSpec(name="job", command=(str(run.path.parent / "train.py"),), run_dir=str(run.path))
    return execute(make_plan(spec, interpreter="/python"))


def test_a_refused_job_leaves_nothing(run: RunDir) -> None:
    with pytest.raises(SlurmError, match="refused the job: no"):
        submit(run, REFUSED)
    assert not run.path.exists()


def test_a_full_disk_is_told_with_the_file_or_else_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(UsageError, match="No space") as error:
            submit(run, "echo 7")
    assert error.value.where == str(run.job_toml)
    monkeypatch.setattr(submitted.Executor, "_submit", fail)  # its script is written without a name in the error
    with pytest.raises(UsageError, match="No space") as error:
        submit(run, "echo 7")
    assert error.value.where == str(run.path)
    assert not run.path.exists()


def test_a_task_that_works_in_the_run_is_named_by_its_label(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    # the task that started last has the id of its whole array, all of which `scancel 9` would end
    run.attempt(0).path.mkdir(parents=True)
    claim = Claim(job_id="9", task="9_1", restart=0, nonce="n", host="a", nodes=("a",), time=0.0, hub="a:1")
    run.attempt(0).claim.write_bytes(claim_bytes(claim))
    monkeypatch.setattr(query, "job_states", lambda ids: dict.fromkeys(ids, "PENDING"))
    monkeypatch.setattr(query, "show_job", lambda *_, **__: None)
    with pytest.raises(RunInUseError, match="job 9_1 ") as error:
        refuse_run_in_use(JobSpec(name="job", command=("/train.py",), run_dir=str(run.path)))
    assert "`scancel 9_1`" in (error.value.fix or "")


def test_a_job_of_another_cluster_that_was_heard_of_lately_has_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(0).path.mkdir(parents=True)
    spec = JobSpec(name="job", command=("/train.py",), run_dir=str(run.path))

    def claimed(at: float) -> None:
        claim = Claim(
            job_id="9", restart=0, nonce="n", host="a", nodes=("a",), time=at, hub="a:1", cluster="pc@ip-10-0-0-1"
        )
        run.attempt(0).claim.write_bytes(claim_bytes(claim))

    monkeypatch.setattr(query, "job_states", lambda ids: {})
    claimed(time.time() - 5)
    with pytest.raises(RunInUseError, match="job 9 of pc@ip-10-0-0-1 was at work"):
        refuse_run_in_use(spec)
    Ledger(run.ledger).append("decided", attempt=0, code=0, cause="done", why="", requeue="none")
    refuse_run_in_use(spec)  # it ended, and Slurm has forgotten it
    run.ledger.unlink()
    claimed(time.time() - 500)
    refuse_run_in_use(spec)  # and so has this one, without a word


@pytest.mark.parametrize("sbatch", [SILENT, GARBLED, LATE])
def test_a_job_that_slurm_may_have_keeps_its_run_directory(run: RunDir, sbatch: str) -> None:
    with pytest.raises(UnclearSubmissionError, match="may have been submitted") as error:
        submit(run, sbatch)
    assert "squeue --me" in (error.value.fix or "")
    assert run.job_toml.exists()
    assert (run.path / "logs").is_dir()


def test_a_disk_that_is_full_after_sbatch_does_not_undo_the_job(run: RunDir) -> None:
    logs = run.path / "logs" / "submitit"
    # a folder where submitit's file should go stands for a disk that takes no more
    job = submit(run, f"mkdir -p {logs}/7_submission.sh/x {run.ledger}; echo 7")
    assert job.job_id == "7"
    assert run.job_toml.exists()
    assert any("submitit's files of job 7 cannot be written" in note for note in job.notes)
    assert any(f"{run.ledger} cannot be written" in note for note in job.notes)
