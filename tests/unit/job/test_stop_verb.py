"""Asking a running job to stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.job.find import Found
from pctool.job.stop import request_stop
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.run.stop import StopRequest, read_stop, write_stop
from pctool.slurm import query
from pctool.slurm.parse import JobInfo, parse_jobs


def job(state: str = "RUNNING", *, requeue: int = 1, restarts: int = 2) -> JobInfo:
    more = f"Requeue={requeue} Restarts={restarts}"
    return parse_jobs(f"JobId=7 JobName=x\n UserId=ada(1)\n JobState={state} Reason=None\n {more}\n")[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(query, "ask", lambda argv, **_: asked.append(argv))
    return asked


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.attempt(2).path.mkdir(parents=True)
    claim = Claim(job_id="7", restart=2, nonce="n", host="a", nodes=("a",), time=0.0, hub="a:1")
    made.attempt(2).claim.write_bytes(claim_bytes(claim))
    return made


@pytest.mark.parametrize("requeue", [True, False])
def test_the_file_says_who_and_whether_it_goes_on(run: RunDir, asked: list[Sequence[str]], requeue: bool) -> None:
    stopping = request_stop(Found(run=run, job=job()), who="ada", requeue=requeue)
    assert (stopping.job_id, stopping.attempt, stopping.slow) == ("7", 2, None)
    assert read_stop(run.attempt(2)) == StopRequest(why="user", who="ada", requeue=requeue)
    assert asked == [["scancel", "--batch", "--signal=USR1", "7"]]


def test_the_deadline_of_a_notice_stands(run: RunDir, asked: list[Sequence[str]]) -> None:
    write_stop(run.attempt(2), StopRequest(why="notice", who="n2", deadline=123.0))
    request_stop(Found(run=run, job=job()), who="ada", requeue=False)
    assert read_stop(run.attempt(2)) == StopRequest(why="user", who="ada", deadline=123.0, requeue=False)


def test_whether_the_script_follows_is_told(run: RunDir, asked: list[Sequence[str]]) -> None:
    found = Found(run=run, job=job())
    first = request_stop(found, who="ada", requeue=False)
    assert (first.follows, first.again) == (False, False)
    Ledger(run.ledger).append("resumed", attempt=1, name="000000-00000005", step=5)  # of another attempt
    assert not request_stop(found, who="ada", requeue=False).follows
    run.job_toml.write_text('stop-signal = "USR1"\n')
    second = request_stop(found, who="ada", requeue=False)
    assert (second.follows, second.again) == (True, True)
    run.job_toml.unlink()
    Ledger(run.ledger).append("fresh", attempt=2)
    assert request_stop(found, who="ada", requeue=False).follows


def test_a_signal_that_fails_only_makes_it_slow(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(argv: Sequence[str], **_: Any) -> None:
        raise SlurmError("slurmctld is silent")

    monkeypatch.setattr(query, "ask", refuse)
    assert request_stop(Found(run=run, job=job()), who="ada", requeue=False).slow == "slurmctld is silent"
    assert read_stop(run.attempt(2)) is not None


@pytest.mark.parametrize("state", ["PENDING", "SPECIAL_EXIT", "COMPLETING", "FAILED"])
def test_a_job_that_does_not_run(run: RunDir, asked: list[Sequence[str]], state: str) -> None:
    with pytest.raises(NotFoundError, match="is not running"):
        request_stop(Found(run=run, job=job(state)), who="ada", requeue=False)
    assert read_stop(run.attempt(2)) is None
    assert asked == []


def test_a_job_that_slurm_does_not_have(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="does not have it"):
        request_stop(Found(run=run, job_id="7"), who="ada", requeue=False)
    with pytest.raises(SlurmError, match="silent"):
        request_stop(Found(run=run, job_id="7", slurm_silent="silent"), who="ada", requeue=False)


def test_the_job_that_took_on_the_run_is_not_stopped_by_the_name_of_an_older_one(
    run: RunDir, asked: list[Sequence[str]]
) -> None:
    with pytest.raises(NotFoundError, match=r"job 3 is not running: .* job 7 took on its run") as error:
        request_stop(Found(run=run, job_id="7", job=job(), successor_of="3"), who="ada", requeue=False)
    assert "pctool stop 7" in (error.value.fix or "")
    assert (read_stop(run.attempt(2)), asked) == (None, [])


def test_before_the_claim_and_after_another_job_s(run: RunDir, tmp_path: Path, asked: list[Sequence[str]]) -> None:
    with pytest.raises(UsageError, match="not claimed"):
        request_stop(Found(run=RunDir(tmp_path / "new"), job=job()), who="ada", requeue=False)
    other = Claim(job_id="6", restart=0, nonce="n", host="a", nodes=("a",), time=0.0, hub="a:1")
    run.attempt(2).claim.write_bytes(claim_bytes(other))
    with pytest.raises(UsageError, match="not claimed"):
        request_stop(Found(run=run, job=job()), who="ada", requeue=False)


@pytest.mark.parametrize("state", ["CONFIGURING", "RUNNING"])
def test_between_a_requeue_and_the_next_claim(run: RunDir, asked: list[Sequence[str]], state: str) -> None:
    # the id is the same, but the attempt is one that has ended; its nodes may boot for minutes
    with pytest.raises(UsageError, match="not claimed") as error:
        request_stop(Found(run=run, job=job(state, restarts=3)), who="ada", requeue=False)
    assert "scancel 7" in (error.value.fix or "")
    assert read_stop(run.attempt(2)) is None
    assert asked == []  # a signal before the claim would leave a note of the time limit, and the job would go on


def test_a_job_that_slurm_does_not_requeue_is_not_said_to_go_on(run: RunDir, asked: list[Sequence[str]]) -> None:
    with pytest.raises(UsageError, match="no-requeue"):
        request_stop(Found(run=run, job=job(requeue=0)), who="ada", requeue=True)
    assert (read_stop(run.attempt(2)), asked) == (None, [])
    assert not request_stop(Found(run=run, job=job(requeue=0)), who="ada", requeue=False).requeue
