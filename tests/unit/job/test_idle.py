"""Whether a run is in use, by Slurm's word or, where Slurm is silent, by the attempt's own signs of life."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pctool.errors import RunInUseError, SlurmError
from pctool.job import idle
from pctool.job.heartbeat import SILENT_S
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.slurm import query

NOW = 10_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run whose attempt 1 job 7 claimed long ago."""
    made = RunDir(tmp_path / "gpt")
    for number in (0, 1):
        made.attempt(number).path.mkdir(parents=True)
        claim = Claim(job_id="7", restart=number, nonce="n", host="a", nodes=("a",), time=1.0, hub="a:1")
        made.attempt(number).claim.write_bytes(claim_bytes(claim))
    Ledger(made.ledger).append("claim", attempt=1, job_id="7")
    return made


def slurm_says(monkeypatch: pytest.MonkeyPatch, states: dict[str, str] | None) -> None:
    def ask(_: object) -> dict[str, str]:
        if states is None:
            raise SlurmError("Unable to contact slurm controller")
        return states

    monkeypatch.setattr(query, "job_states", ask)
    monkeypatch.setattr(idle, "works_elsewhere", lambda *_: False)


def beat(run: RunDir, at: float) -> None:
    run.attempt(1).heartbeat.write_text(json.dumps({"time": at, "step": 3}))


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_that_runs_holds_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    slurm_says(monkeypatch, {"7": state})
    with pytest.raises(RunInUseError, match=f"job 7 is {state}") as caught:
        idle.check_idle(run, now=NOW)
    assert "pctool stop 7" in (caught.value.fix or "")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED", "NODE_FAIL"])
def test_a_job_that_waits_or_is_over_does_not(run: RunDir, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    slurm_says(monkeypatch, {"7": state})
    beat(run, NOW)
    assert idle.check_idle(run, now=NOW) == 1


def test_a_job_that_was_submitted_since_counts_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(run.ledger).append("submitted", job_id="8")
    slurm_says(monkeypatch, {"7": "COMPLETED", "8": "RUNNING"})
    with pytest.raises(RunInUseError, match="job 8 is RUNNING"):
        idle.check_idle(run, now=NOW)


@pytest.mark.parametrize("states", [None, {}])
def test_where_slurm_does_not_tell_the_heartbeat_does(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, states: dict[str, str] | None
) -> None:
    slurm_says(monkeypatch, states)
    assert idle.check_idle(run, now=NOW) == 1
    beat(run, NOW - SILENT_S + 1)
    with pytest.raises(RunInUseError, match="attempt 1 may be at work: it was heard 599 s ago"):
        idle.check_idle(run, now=NOW)
    beat(run, NOW - SILENT_S - 1)
    assert idle.check_idle(run, now=NOW) == 1


def test_one_that_ended_for_good_is_over_at_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says(monkeypatch, None)
    beat(run, NOW)
    Ledger(run.ledger).append("decided", attempt=1, code=0, cause="done", why="", requeue="none")
    assert idle.check_idle(run, now=NOW) == 1


def test_a_run_that_nobody_claimed_is_idle(tmp_path: Path) -> None:
    assert idle.check_idle(RunDir(tmp_path / "new")) == -1
    run = RunDir(tmp_path / "torn")
    run.attempt(0).path.mkdir(parents=True)  # its owner died before it wrote its claim
    assert idle.check_idle(run) == 0
    run.attempt(0).heartbeat.write_text(json.dumps({"time": time.time(), "step": 3}))
    with pytest.raises(RunInUseError, match="left no claim"):
        idle.check_idle(run)
