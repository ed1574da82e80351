"""Waiting for a submitted job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pctool.errors import SlurmError
from pctool.job import submitted
from pctool.job.submitted import SubmittedJob
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.slurm import query
from pctool.slurm.parse import parse_jobs

HELD = "JobId=7 JobName=x\n UserId=ada(1)\n JobState={state} Reason={reason}\n Priority={priority}\n"


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the states that squeue will tell, one a poll; scontrol tells the last one told."""
    states: list[str] = []
    told: list[str] = []

    def job_states(ids: object) -> dict[str, str]:
        state = states.pop(0)
        if state == "silent":
            raise SlurmError("no answer")
        told.append(state)
        return {"7": state}

    def show_job(job_id: str) -> object:
        held = told[-1] == "SPECIAL_EXIT"
        text = HELD.format(state=told[-1], reason="JobHeldUser" if held else "None", priority=0 if held else 5)
        return parse_jobs(text)[0]

    monkeypatch.setattr(query, "job_states", job_states)
    monkeypatch.setattr(query, "show_job", show_job)
    monkeypatch.setattr(submitted, "HOLD_POLLS", 1)
    return states


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    return now


def test_each_hold_is_told_once(
    states: list[str], clock: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Ledger(RunDir(tmp_path).ledger).append("held", attempt=2, rule="stalled", why="3 attempts in a row")
    states += ["RUNNING", "SPECIAL_EXIT", "SPECIAL_EXIT", "RUNNING", "SPECIAL_EXIT", "COMPLETED"]
    SubmittedJob(tmp_path, "7", run_dir=tmp_path).wait()
    assert [record.getMessage() for record in caplog.records] == [
        "job 7 is held: 3 attempts in a row; `pctool status 7` tells what to do"
    ] * 2


@pytest.mark.parametrize(("claimed_by", "state"), [("5_1", "FAILED"), ("9_1", "COMPLETED")])
def test_a_task_that_slurm_has_forgotten_is_told_by_its_own_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, claimed_by: str, state: str
) -> None:
    # a task claims by an id that submit never saw; another array may have worked in the same run directory before
    run, ledger = RunDir(tmp_path), Ledger(RunDir(tmp_path).ledger)
    run.attempt(0).path.mkdir(parents=True)
    claim = Claim(job_id="6", task=claimed_by, restart=0, nonce="n", host="a", nodes=("a",), time=0.0, hub="a:1")
    run.attempt(0).claim.write_bytes(claim_bytes(claim))
    ledger.append("claim", attempt=0, job_id="6", restart=0, nodes=["a"], host="a")
    ledger.append("decided", attempt=0, code=0, cause="done", why="", requeue="none")
    ledger.append("submitted", job_id="9_1")
    run.attempt(1).path.mkdir()
    run.attempt(1).claim.write_text("{")  # torn
    monkeypatch.setattr(query, "job_states", lambda _: {})
    assert SubmittedJob(tmp_path, "9_1", run_dir=tmp_path).state == state


def test_a_silent_slurm_is_waited_out_but_not_for_ever(states: list[str], clock: list[float], tmp_path: Path) -> None:
    states += ["silent", "RUNNING", "silent", "COMPLETED"]
    SubmittedJob(tmp_path, "7", run_dir=tmp_path).wait()
    states += ["silent"] * 1000
    with pytest.raises(SlurmError, match="no answer"):
        SubmittedJob(tmp_path, "8", run_dir=tmp_path).wait()
    assert clock[0] > submitted.SILENCE_S
