"""How a run stands now."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pctool.errors import SlurmError
from pctool.job.doomed import Doomed
from pctool.job.find import Found
from pctool.job.hold import ADVICE
from pctool.job.status import QUIET_S, as_json, next_start, status_of, status_of_mine, unmirrored
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.stop import StopRequest, write_stop
from pctool.slurm import query
from pctool.slurm.comment import format_comment
from pctool.slurm.parse import JobInfo, QueueLine, parse_jobs, parse_nodes

LATER = "2030-01-02T03:04:05"


def job(state: str = "RUNNING", *, reason: str = "None", comment: str = "pctool:/r", **more: Any) -> JobInfo:
    fields = {"Requeue": 1, "Restarts": 0, "Priority": 5, **more}
    pairs = " ".join(f"{key}={value}" for key, value in fields.items())
    head = f"JobId=7 JobName=x\n UserId=ada(1) GroupId=a(1)\n JobState={state} Reason={reason}"
    return parse_jobs(f"{head}\n {pairs}\n Comment={comment}\n")[0]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.attempt(0).path.mkdir(parents=True)
    Ledger(made.ledger).append("claim", attempt=0, job_id="7", restart=0, nodes=["a"], host="a")
    return made


def beat(run: RunDir, *, step: int, step_time: float, saving_since: float = 0.0) -> None:
    record = {"time": time.time(), "step": step, "step_time": step_time, "committed": -1, "saving_since": saving_since}
    run.attempt(0).heartbeat.write_text(json.dumps(record))


def test_a_running_job(run: RunDir) -> None:
    now = time.time()
    beat(run, step=420, step_time=now - 2)
    ledger = Ledger(run.ledger)
    ledger.append("committed", attempt=0, name="000000-00000400", step=400, bytes=1, seconds=1, tier="posix")
    status = status_of(Found(run=run, job_id="7", job=job(NodeList="n[1-2]")), now=now)
    assert (status.state, status.attempt, status.step, status.nodes) == ("RUNNING", 0, 420, "n[1-2]")
    assert status.step_age_s == pytest.approx(2, abs=0.2)
    assert status.checkpoint is not None
    assert (status.checkpoint.step, status.checkpoint.tiers) == (400, ("posix",))
    assert status.notes == ()
    ledger.append("mirrored", attempt=0, name="000000-00000400", step=400, seconds=1, bytes=1)
    ledger.append("committed", attempt=0, name="000000-00000440", step=440, bytes=1, seconds=1, tier="posix")
    assert status_of(Found(run=run, job=job())).step == 440  # the heartbeat is up to five seconds old
    ledger.append("pruned", attempt=0, name="000000-00000440")
    mirrored = status_of(Found(run=run, job=job())).checkpoint
    assert mirrored is not None
    assert mirrored.tiers == ("posix", "s3")
    assert json.loads(json.dumps(as_json(status)))["checkpoint"]["name"] == "000000-00000400"


def test_no_step_for_long(run: RunDir) -> None:
    now = time.time()
    found = Found(run=run, job=job())
    assert status_of(found, now=now).notes == ()
    assert status_of(found, now=now + QUIET_S + 60).notes == ("no step yet in this attempt for 3 min",)
    beat(run, step=3, step_time=now)
    assert status_of(found, now=now + 600).notes == ("no step for 10 min",)
    beat(run, step=3, step_time=now, saving_since=now + 590)
    assert status_of(found, now=now + 600).notes == ("saving for 10.0 s",)


def test_a_requeued_job_that_waits(run: RunDir) -> None:
    waiting = job("PENDING", reason="BeginTime", Restarts=1, EligibleTime=LATER)
    assert next_start(waiting) == time.mktime(time.strptime(LATER, "%Y-%m-%dT%H:%M:%S"))
    assert status_of(Found(run=run, job=waiting)).next_start == next_start(waiting)
    assert next_start(job("PENDING", reason="BeginTime", EligibleTime=LATER)) is None
    assert next_start(job("PENDING", reason="JobHeldUser", Restarts=1, Priority=0, EligibleTime=LATER)) is None
    assert next_start(job("RUNNING", Restarts=1, EligibleTime=LATER)) is None


def test_a_wait_that_a_doomed_node_makes_longer(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    node = parse_nodes("NodeName=n2 State=IDLE+CLOUD\n")[0]
    monkeypatch.setattr(query, "show_node", lambda name, **_: node)
    waiting = job("PENDING", reason="BeginTime", Restarts=1, EligibleTime=LATER)
    now = time.time()
    Ledger(run.ledger).append("notice", attempt=0, node="n2", action="terminate", deadline=now + 60)
    found = status_of(Found(run=run, job=waiting), now=now)
    assert found.doomed == Doomed(node="n2", until=now + 60)
    assert found.reason == "BeginTime"
    assert status_of(Found(run=run, job=waiting), now=now + 61).doomed is None
    assert status_of(Found(run=run, job=job()), now=now).doomed is None


def test_why_the_newest_attempt_ended(run: RunDir) -> None:
    Ledger(run.ledger).append("decided", attempt=0, code=7, cause="program-error", why="n1: ValueError", requeue="none")
    failed = status_of(Found(run=run, job=job("FAILED")))
    assert (failed.cause, failed.why, failed.reason) == ("program-error", "n1: ValueError", None)
    cancelled = status_of(Found(run=run, job=job("CANCELLED")))
    assert (cancelled.cause, cancelled.why) == ("cancelled", "ended by scancel, without a save")


def test_a_stop_that_nobody_follows(run: RunDir) -> None:
    now = time.time()
    running = Found(run=run, job_id="7", job=job())
    write_stop(run.attempt(0), StopRequest(why="user", who="ada"))
    (unseen,) = status_of(running, now=now).notes
    assert unseen == "asked to stop (user) by ada, not yet seen by the launches"
    ledger = Ledger(run.ledger)
    ledger.append("stop-requested", attempt=0, why="user", node="ada", deadline=0.0)
    assert status_of(running, now=now).notes == ()
    note = status_of(running, now=now + 240).notes[-1]
    assert "4 min 00 s ago, and it still runs: its script uses neither pctool.train nor --stop-signal" in note
    assert "`scancel 7` ends it" in note
    # the task that started last has the id of its whole array, all of which `scancel 7` would end
    task = Found(run=run, job_id="7", job=job(ArrayJobId=7, ArrayTaskId=1))
    assert "`scancel 7_1` ends it" in status_of(task, now=now + 240).notes[-1]
    ledger.append("fresh", attempt=0)
    assert "neither" not in status_of(running, now=now + 240).notes[-1]


def test_a_job_whose_run_another_one_took_on(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    comment = format_comment(str(run.path))
    Ledger(run.ledger).append("submitted", job_id="7")
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: job(comment=comment) if job_id == "7" else None)
    old = replace(job("COMPLETED", comment=comment), job_id="5")
    found = status_of(Found(run=run, job_id="5", job=old))
    assert (found.job_id, found.state) == ("7", "RUNNING")
    assert found.notes[0] == "job 5 is over (COMPLETED); this is job 7, which took on its run"
    waiting = replace(job("PENDING", comment=comment), job_id="9")
    assert status_of(Found(run=run, job_id="9", job=waiting)).job_id == "9"  # it has not claimed yet


def test_why_a_job_is_held(run: RunDir) -> None:
    held: dict[str, Any] = {"reason": "JobHeldUser", "Priority": 0}
    noted = job("PENDING", comment=format_comment("/r", "held: 3 attempts in a row"), **held)
    assert status_of(Found(run=run, job=noted)).held == "3 attempts in a row"
    plain = job("SPECIAL_EXIT", **held)
    assert "held by its owner" in (status_of(Found(run=run, job=plain)).held or "")
    assert status_of(Found(run=run, job=plain)).advice == "`scontrol release 7`"
    Ledger(run.ledger).append("held", attempt=0, why="the bucket is gone", rule="store-unreadable")
    assert status_of(Found(run=run, job=plain)).held == "the bucket is gone"
    assert status_of(Found(run=run, job=plain)).advice == ADVICE["store-unreadable"].format(job="7")
    assert status_of(Found(run=run, job=job())).held is None


def test_a_job_that_slurm_does_not_know_or_cannot_tell(run: RunDir) -> None:
    Ledger(run.ledger).append("decided", attempt=0, code=0, cause="done", why="", requeue="none")
    gone = status_of(Found(run=run, job_id="7"))
    assert (gone.state, gone.cause, gone.job_id) == ("gone", "done", "7")
    silent = status_of(Found(run=run, job_id="7", slurm_silent="no answer in 30 s"))
    assert silent.state == "unknown"
    assert "no answer" in silent.notes[0]


def test_what_is_not_mirrored(run: RunDir) -> None:
    ledger = Ledger(run.ledger)
    ledger.append("mirror-failed", attempt=0, name="000000-00000100", step=100, error="403")
    ledger.append("mirror-failed", attempt=0, name="000000-00000200", step=200, error="403")
    ledger.append("mirrored", attempt=0, name="000000-00000100", step=100, seconds=1, bytes=1)
    assert unmirrored(ledger.read()) == ["000000-00000200"]
    assert status_of(Found(run=run, job=job())).notes == ("not mirrored: 000000-00000200",)
    # one that was never tried, since S3 refused an older one
    ledger.append(
        "mirror-failed", attempt=0, name="000000-00000200", step=200, error="403", waiting=["000000-00000300"]
    )
    assert unmirrored(ledger.read()) == ["000000-00000200", "000000-00000300"]
    ledger.append("mirrored", attempt=0, name="000000-00000300", step=300, seconds=1, bytes=1)
    ledger.append("pruned", attempt=0, name="000000-00000200")
    assert unmirrored(ledger.read()) == []


def test_all_of_mine(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    comment = format_comment(str(run.path))
    lines = [
        QueueLine(label="7", job_id="7", state="RUNNING", reason="None", comment=comment),
        QueueLine(label="8", job_id="8", state="RUNNING", reason="None", comment="sweep"),
        QueueLine(label="9", job_id="9", state="PENDING", reason="None", comment=comment),
    ]

    def show_job(job_id: str, **_: float) -> JobInfo:
        if job_id == "9":
            raise SlurmError("slurmctld does not answer")
        return job(comment=comment)

    monkeypatch.setattr(query, "my_jobs", lambda: lines)
    monkeypatch.setattr(query, "show_job", show_job)
    first, second = status_of_mine(jobs=tmp_path / "none")
    assert (first.job_id, first.attempt) == ("7", 0)
    assert (second.job_id, second.state, second.attempt) == ("9", "PENDING", None)
    assert "does not answer" in second.notes[0]
