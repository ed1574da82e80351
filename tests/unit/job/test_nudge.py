"""Which jobs are nudged, and which never."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pctool.errors import NotFoundError, SlurmError
from pctool.job import nudge as module
from pctool.job.nudge import is_due, longest_wait, nudge, watch
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.comment import format_comment
from pctool.slurm.parse import JobInfo, QueueLine, parse_jobs

NOW = 1_000_000.0


def job(**changes: Any) -> JobInfo:
    base = {
        "state": "PENDING", "reason": "BeginTime", "restarts": 1, "priority": 5, "comment": "pctool:/r",
        "submit_time": NOW - 90, "eligible_time": NOW + 50,
    }  # fmt: skip
    text = "JobId=7 JobName=x\n UserId=ada(1)\n JobState=PENDING Reason=BeginTime\n"
    parsed = parse_jobs(text)[0]
    return JobInfo(**{**{name: getattr(parsed, name) for name in parsed.__dataclass_fields__}, **base, **changes})


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, True),
        ({"reason": "NonZeroExitCode"}, True),
        ({"eligible_time": NOW - 30}, True),  # over, but Slurm's next scheduling pass is still to come
        ({"eligible_time": None}, True),
        ({"reason": "None", "eligible_time": None}, False),  # just released: Slurm starts it at its next pass
        ({"restarts": 0}, False),
        ({"comment": "sweep"}, False),
        ({"comment": None}, False),
        ({"reason": "JobHeldUser", "priority": 0}, False),
        ({"priority": 0}, False),
        ({"state": "SPECIAL_EXIT"}, False),
        ({"state": "RUNNING"}, False),
        ({"state": "COMPLETING"}, False),
        ({"reason": "Resources"}, False),
        ({"reason": "Dependency"}, False),
        ({"eligible_time": NOW + 7200}, False),  # a begin time that somebody asked for
    ],
)
def test_what_is_due(changes: dict[str, Any], due: bool) -> None:
    assert is_due(job(**changes), now=NOW, longest_wait_s=131) is due


def test_the_longest_wait() -> None:
    assert longest_wait({"AuthInfo": "socket=/s,cred_expire=70"}) == 131
    assert longest_wait({"AuthInfo": ""}) == longest_wait({}) == 181


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(query, "config", lambda: {"AuthInfo": "cred_expire=70"})
    monkeypatch.setattr(query, "ask", lambda argv, **_: asked.append(argv))
    lines = [
        QueueLine(label="7", job_id="7", state="PENDING", reason="BeginTime", comment="pctool:/r"),
        QueueLine(label="8", job_id="8", state="PENDING", reason="BeginTime", comment="sweep"),
        QueueLine(label="9", job_id="9", state="RUNNING", reason="None", comment="pctool:/r"),
    ]
    monkeypatch.setattr(query, "my_jobs", lambda: lines)
    jobs = {"7": job(), "8": job(job_id="8", comment="sweep")}
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: jobs.get(job_id))
    return asked


def test_only_our_waiting_jobs_are_nudged(asked: list[Sequence[str]]) -> None:
    (done,) = nudge()
    assert (done.job.job_id, done.saved_s, done.error) == ("7", 50, None)
    assert asked == [["scontrol", "update", "JobId=7", "StartTime=now"]]


def test_a_task_is_named_by_its_label(asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    task = job(array_job_id="7", array_task_id="1")  # it started last: its id is that of the whole array
    monkeypatch.setattr(query, "show_job", lambda *_, **__: task)
    nudge(["7_1"])
    assert asked == [["scontrol", "update", "JobId=7_1", "StartTime=now"]]


@pytest.mark.parametrize(
    ("submit_time", "waits"), [(NOW - 90, False), (NOW - 20, True), (NOW, True), (NOW + 40, True), (None, True)]
)
def test_the_second_of_the_requeue_is_waited_out(
    asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, submit_time: float | None, waits: bool
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert asked == []  # before the nudge, not after
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: job(submit_time=submit_time))
    nudge(["7"])
    assert (sum(slept) > 1) is waits
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("deadline", "states", "nudged"),
    [
        (NOW + 100, {"IDLE"}, False),
        (NOW + 100, {"IDLE", "DRAIN"}, True),  # root's watcher was there
        (NOW + 100, {"DOWN"}, True),
        (NOW + 100, None, True),  # no node of that name any more
        (NOW - 1, {"IDLE"}, True),
    ],
)
def test_a_job_that_might_get_a_doomed_node_again_is_left_alone(
    asked: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    deadline: float,
    states: set[str] | None,
    nudged: bool,
) -> None:
    Ledger(RunDir(tmp_path).ledger).append("notice", attempt=0, node="n2", action="terminate", deadline=deadline)
    node = None if states is None else SimpleNamespace(states=frozenset(states))
    monkeypatch.setattr(query, "show_node", lambda name, **_: node if name == "n2" else None)
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: job(comment=format_comment(str(tmp_path))))
    (done,) = nudge(["7"])
    assert bool(asked) is nudged
    assert (done.doomed is None) is nudged
    if done.doomed is not None:
        assert (done.doomed.node, done.doomed.until) == ("n2", deadline)


def test_a_watch_nudges_once_the_notice_is_over(
    asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Ledger(RunDir(tmp_path).ledger).append("step-back", attempt=0, node="n2", deadline=NOW + 5)
    node = SimpleNamespace(states=frozenset({"IDLE"}))
    monkeypatch.setattr(query, "show_node", lambda name, **_: node)
    monkeypatch.setattr(module, "_waiting", lambda: [job(comment=format_comment(str(tmp_path)))])
    clock = [NOW]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    watching = watch()
    assert next(watching).doomed is not None
    assert asked == []
    done = next(watching)  # told once, though it was looked at twice
    assert (done.doomed, done.error, len(asked)) == (None, None, 1)
    assert clock[0] > NOW + 5


@pytest.mark.parametrize("job_id", ["8", "99"])
def test_a_named_job_that_is_not_ours(asked: list[Sequence[str]], job_id: str) -> None:
    with pytest.raises(NotFoundError):
        nudge([job_id])
    assert asked == []


def test_slurm_s_refusal_is_told(asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(argv: Sequence[str], **_: Any) -> None:
        raise SlurmError("Access/permission denied")

    monkeypatch.setattr(query, "ask", refuse)
    (done,) = nudge(["7"])
    assert done.error == "Access/permission denied"


def test_a_watch_tells_each_restart_once_and_waits_slurm_out(
    asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[list[JobInfo] | SlurmError] = iter(
        [[job()], SlurmError("restarting"), [job()], [], [job(restarts=2)]]
    )

    def waiting() -> list[JobInfo]:
        answer = next(answers)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(module, "_waiting", waiting)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    watching = watch()
    assert [next(watching).job.restarts for _ in range(2)] == [1, 2]
    assert len(asked) == 2  # a second nudge of the same restart would only send it back
