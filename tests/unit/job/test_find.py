"""From a job id or a path to the run directory."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.job.find import Found, find_run, jobs_file, last_job_id
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.slurm import query
from pctool.slurm.comment import format_comment
from pctool.slurm.parse import JobInfo, parse_jobs


def record(job_id: str, comment: str, *, task: str = "") -> str:
    array = f"ArrayJobId=5 ArrayTaskId={task} " if task else ""
    return (
        f"JobId={job_id} {array}JobName=x\n   UserId=ada(1) GroupId=ada(1)\n"
        f"   JobState=RUNNING Reason=None\n   Comment={comment} \n"
    )


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the jobs Slurm knows, label -> record; 'silent' makes it not answer."""
    known: dict[str, str] = {}

    def show_job(job_id: str, **_: float) -> JobInfo | None:
        if "silent" in known:
            raise SlurmError("slurmctld does not answer")
        found = known.get(job_id)
        return parse_jobs(found)[0] if found else None

    monkeypatch.setattr(query, "show_job", show_job)
    return known


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "my run")
    made.path.mkdir()
    Ledger(made.ledger).append("submitted", job_id="7")
    return made


def test_by_job_id_through_the_comment(run: RunDir, jobs: dict[str, str], tmp_path: Path) -> None:
    jobs["7"] = record("7", format_comment(str(run.path), "held: 3 attempts"))
    found = find_run("7", jobs=tmp_path / "none")
    assert (found.run, found.job_id) == (run, "7")
    assert found.job is not None


def test_by_array_task(run: RunDir, jobs: dict[str, str], tmp_path: Path) -> None:
    jobs["5_3"] = record("9", format_comment("/fsx/sweep-%a"), task="3")
    found = find_run("5_3", jobs=tmp_path / "none")
    assert (str(found.run.path), found.job_id) == ("/fsx/sweep-3", "9")
    jobs["5"] = record("5", format_comment("/fsx/sweep-%a"), task="4-9%2")
    with pytest.raises(UsageError, match="array"):
        find_run("5", jobs=tmp_path / "none")


def test_by_job_id_that_slurm_has_forgotten(run: RunDir, jobs: dict[str, str], tmp_path: Path) -> None:
    remembered = tmp_path / "jobs.jsonl"
    lines = [
        {"job_id": "7", "run_dir": "/old"},
        {"job_id": "7", "run_dir": str(run.path)},
        {"job_id": "5", "run_dir": f"{tmp_path}/s-%a"},
    ]
    (tmp_path / "s-2").mkdir()
    remembered.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"job_id": "8", "ru')
    assert find_run("7", jobs=remembered).run == run
    assert find_run("5_2", jobs=remembered).run == RunDir(tmp_path / "s-2")
    with pytest.raises(NotFoundError, match="the run directory of job 5_3 is not there"):
        find_run("5_3", jobs=remembered)
    with pytest.raises(NotFoundError, match="does not know it"):
        find_run("8", jobs=remembered)
    jobs["silent"] = ""
    assert find_run("7", jobs=remembered).slurm_silent == "slurmctld does not answer"
    with pytest.raises(NotFoundError, match="does not answer"):
        find_run("8", jobs=remembered)


def test_somebody_else_s_job(jobs: dict[str, str], tmp_path: Path) -> None:
    jobs["7"] = record("7", "sweep")
    with pytest.raises(NotFoundError, match="not one of pctool's"):
        find_run("7", jobs=tmp_path / "none")


def test_by_path(run: RunDir, jobs: dict[str, str], tmp_path: Path) -> None:
    jobs["7"] = record("7", format_comment(str(run.path)))
    found = find_run(str(run.path), jobs=tmp_path / "none")
    assert (found.run, found.job_id) == (run, "7")
    assert found.job is not None
    jobs["7"] = record("7", format_comment("/another/run"))  # an id given anew by another cluster
    assert find_run(str(run.path), jobs=tmp_path / "none").job is None


def claimed(run: RunDir, number: int, job_id: str, *, restart: int = 0, at: float = 0.0) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    claim = Claim(job_id=job_id, restart=restart, nonce="n", host="a", nodes=("a",), time=at, hub="a:1")
    attempt.claim.write_bytes(claim_bytes(claim))


def test_a_forgotten_job_leads_to_the_one_that_took_on_its_run(run: RunDir, jobs: dict[str, str]) -> None:
    remembered = run.path.parent / "jobs.jsonl"
    remembered.write_text(json.dumps({"job_id": "7", "run_dir": str(run.path)}) + "\n")
    claimed(run, 0, "7", at=time.time() + 1)
    assert find_run("7", jobs=remembered) == Found(run=run, job_id="7")
    claimed(run, 1, "12", at=time.time() + 2)
    jobs["12"] = record("12", format_comment(str(run.path)))
    found = find_run("7", jobs=remembered)
    assert (found.job_id, found.job and found.job.state, found.successor_of) == ("12", "RUNNING", "7")


def test_a_job_with_a_comment_of_its_own_is_found_by_the_run(run: RunDir, jobs: dict[str, str]) -> None:
    claimed(run, 0, "7", at=1_000_000.0)
    for comment in ("my own words", "(null)"):
        jobs["7"] = record("7", comment)
        found = find_run(str(run.path), jobs=run.path.parent / "none")
        assert (found.job_id, found.alive, found.job is not None) == ("7", True, True)


@pytest.mark.parametrize(
    ("restarts", "start", "ours"),
    [
        (1, "1970-01-13T00:00:00", True),  # the clocks of two machines, and an hour that daylight saving may shift
        (1, "1970-02-01T00:00:00", False),  # this start is younger than the claim of the same count
        (2, "1970-02-01T00:00:00", True),  # requeued, and not claimed yet
        (0, "1970-01-12T00:00:00", False),  # restarts are never counted down
    ],
)
def test_a_job_with_a_comment_of_its_own_may_be_another_cluster_s_namesake(
    run: RunDir, jobs: dict[str, str], restarts: int, start: str, ours: bool
) -> None:
    claimed(run, 0, "7", restart=1, at=1_036_800.0)  # 1970-01-13, in UTC
    jobs["7"] = record("7", "my own words").replace("Reason=None", f"Reason=None Restarts={restarts} StartTime={start}")
    assert (find_run(str(run.path), jobs=run.path.parent / "none").job is not None) is ours


@pytest.mark.parametrize("target", ["nowhere", "."])
def test_a_path_without_a_run(
    target: str, jobs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match="no run directory"):
        find_run(target, jobs=tmp_path / "none")


def test_the_newest_claim_names_the_job(run: RunDir) -> None:
    assert last_job_id(run) == "7"
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    assert last_job_id(run) == "7"
    claim = Claim(job_id="9", restart=0, nonce="n", host="a", nodes=("a",), time=time.time() + 1, hub="a:1")
    attempt.claim.write_bytes(claim_bytes(claim))
    assert last_job_id(run) == "9"
    attempt.claim.write_bytes(claim_bytes(replace(claim, time=1.0)))
    assert last_job_id(run) == "7"  # submitted since, and yet to start


def test_where_jobs_are_remembered() -> None:
    assert jobs_file({"XDG_STATE_HOME": "/s"}) == Path("/s/pctool/jobs.jsonl")
    assert jobs_file({"HOME": "/home/ada"}) == Path("/home/ada/.local/state/pctool/jobs.jsonl")
