"""Accepting a lower step."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import BelowDurableError, find_resume
from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.job.find import Found
from pctool.job.heartbeat import SILENT_S
from pctool.job.resume import accept
from pctool.job.runspec import store_of
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.parse import JobInfo, parse_jobs


def job(state: str, **more: Any) -> JobInfo:
    pairs = " ".join(f"{key}={value}" for key, value in more.items())
    return parse_jobs(f"JobId=7 JobName=x\n UserId=ada(1)\n JobState={state} Reason=None\n {pairs}\n")[0]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run whose ledger knows a checkpoint that is gone."""
    made = RunDir(tmp_path)
    made.attempt(0).path.mkdir(parents=True)
    made.checkpoints.mkdir()
    ledger = Ledger(made.ledger)
    ledger.append("claim", attempt=0, job_id="7", restart=0, nodes=["a"], host="a")
    ledger.append("committed", attempt=0, name="000000-00000400", step=400, bytes=1, seconds=1, tier="posix")
    return made


def test_accepting_a_new_start_lets_the_next_attempt_claim(run: RunDir) -> None:
    with pytest.raises(BelowDurableError):
        find_resume(run, None)
    accepted = accept(Found(run=run, job=job("PENDING", Priority=0)), step=0, store=None)
    assert (accepted.step, accepted.name, accepted.left) == (0, None, ("000000-00000400",))
    assert "scontrol release 7" in accepted.how
    assert Ledger(run.ledger).read()[-1].event == "accepted"
    assert find_resume(run, None) is None


def test_without_a_job_it_is_submitted_again(run: RunDir) -> None:
    assert "submit the job again" in accept(Found(run=run), step=0, store=None).how


def test_the_run_goes_on_from_the_very_checkpoint_that_was_named(run: RunDir) -> None:
    for attempt, step in ((0, 400), (1, 60)):
        folder = run.checkpoints / checkpoint_name(attempt, step)
        folder.mkdir()
        (folder / mf.NAME).write_bytes(
            mf.encode(mf.Manifest(run="r", attempt=attempt, step=step, parent=None, world_size=1, files={}))
        )
    ledger = Ledger(run.ledger)
    ledger.append("resumed", attempt=1, name="000000-00000050", step=50, tier="posix", seconds=1)
    ledger.append("committed", attempt=1, name="000001-00000060", step=60, bytes=1, seconds=1, tier="posix")
    accepted = accept(Found(run=run), step=400, store=None)
    point = find_resume(run, None)
    assert point is not None
    assert accepted.name == point.name == "000000-00000400"
    assert accepted.left == ("000001-00000060",)


def test_a_step_without_a_checkpoint(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="no complete checkpoint is at step 300") as error:
        accept(Found(run=run), step=300, store=None)
    assert "none" in (error.value.fix or "")
    assert Ledger(run.ledger).read()[-1].event == "committed"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_never_while_the_job_runs(run: RunDir, state: str) -> None:
    with pytest.raises(UsageError, match=state):
        accept(Found(run=run, job=job(state)), step=0, store=None)


@pytest.mark.parametrize("named", [job("FAILED"), job("PENDING"), None])
def test_never_while_a_later_job_runs(run: RunDir, monkeypatch: pytest.MonkeyPatch, named: JobInfo | None) -> None:
    claim = {"job_id": "120", "restart": 0, "nonce": "n", "host": "a", "nodes": ["a"], "hub": "a:1", "time": 1.0}
    run.attempt(1).path.mkdir()
    run.attempt(1).claim.write_text(json.dumps(claim))
    later = replace(job("RUNNING"), job_id="120", comment=f"pctool:{run.path}")
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: later if job_id == "120" else None)
    with pytest.raises(UsageError, match="job 120 is RUNNING"):
        accept(Found(run=run, job_id="7", job=named), step=0, store=None)
    assert Ledger(run.ledger).read()[-1].event == "committed"


def test_a_later_job_that_is_held_is_the_one_to_release(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = {"job_id": "120", "restart": 0, "nonce": "n", "host": "a", "nodes": ["a"], "hub": "a:1", "time": 1.0}
    run.attempt(1).path.mkdir()
    run.attempt(1).claim.write_text(json.dumps(claim))
    later = replace(job("PENDING", Priority=0), job_id="120", comment=f"pctool:{run.path}")
    monkeypatch.setattr(query, "show_job", lambda *_, **__: later)
    assert "scontrol release 120" in accept(Found(run=run, job_id="7", job=job("FAILED")), step=0, store=None).how


def test_never_where_slurm_does_not_say_whether_it_runs(run: RunDir) -> None:
    found = Found(run=run, job_id="7", slurm_silent="timed out")
    claim = {"job_id": "7", "restart": 0, "nonce": "n", "host": "a", "nodes": ["a"], "hub": "a:1"}
    run.attempt(0).claim.write_text(json.dumps({**claim, "time": time.time()}))
    with pytest.raises(SlurmError, match="may be running"):
        accept(found, step=0, store=None)
    assert Ledger(run.ledger).read()[-1].event == "committed"
    run.attempt(0).claim.write_text(json.dumps({**claim, "time": time.time() - SILENT_S - 1}))
    assert accept(found, step=0, store=None).step == 0


def test_the_store_of_a_run(run: RunDir) -> None:
    assert store_of(run) is None
    run.job_toml.write_text('[checkpoint]\nstore = "s3://b/p"\n')
    assert store_of(run) == "s3://b/p"
    run.job_toml.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not text"):
        store_of(run)
