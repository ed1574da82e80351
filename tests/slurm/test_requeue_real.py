"""Claim, decide, hold, nudge, stop and doctor on a real private Slurm, by both ways to requeue and to hold."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pctool.cluster.view import load_view
from pctool.facts.resources import resource
from pctool.job.attempts import attempts_of
from pctool.job.doctor import Options, examine
from pctool.job.find import Found, find_run
from pctool.job.nudge import nudge
from pctool.job.status import status_of
from pctool.job.stop import request_stop
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.records import read_claim
from pctool.run.stop import read_stop
from pctool.slurm import query
from pctool.slurm.comment import format_comment, parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.private import PrivateCluster
from pctool.slurm.states import Phase, phase

pytestmark = pytest.mark.slurm

# The flow of pctool's batch script; what the launches do is played: one word an attempt says how its nodes end.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
trap 'signalled=1' USR1
claimed=$({pctool} claim "{run}" --max-stalled {max_stalled}) || exit $?
eval "$claimed"
srun --kill-on-bad-exit=1 --mpi=none {python} {play} {words} &
while true; do
  signalled=""
  wait $!
  code=$?
  [[ -n "$signalled" ]] || break
done
{pctool} decide "$PCTOOL_RUN_DIR" --srun-code "$code"
exit $?
"""

PLAY = """
import json, os, sys, time
from pathlib import Path
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import NodeExit, write_node_exit
from pctool.run.stop import read_stop

run, number = RunDir(Path(os.environ["PCTOOL_RUN_DIR"])), int(os.environ["PCTOOL_ATTEMPT"])
attempt, words, first = run.attempt(number), sys.argv[1:], os.environ["SLURM_NODEID"] == "0"
word = words[min(number, len(words) - 1)]
code = 0
if first:  # as pctool.train does; a script that saves by itself would count its stop as progress
    Ledger(run.ledger).append("fresh", attempt=number)
if word == "sleep":
    while read_stop(attempt) is None:
        time.sleep(0.05)
    cause = "stop"
elif word == "lost":
    if not first:
        os._exit(1)  # as if its node were gone: it leaves no record
    time.sleep(0.5)
    cause, code = "peer-lost", 1
else:
    cause = word
    code = 7 if word == "program-error" else 0
node = os.environ["SLURMD_NODENAME"]
write_node_exit(attempt, NodeExit(node=node, cause=cause, code=code, time=time.time(), saved=cause == "stop"))
sys.exit(code)
"""

TASK = "$SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True)
class Site:
    """A cluster, and by what means it requeues and holds."""

    cluster: PrivateCluster
    means: str


@pytest.fixture(scope="module", params=["exit-code", "scontrol"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    means = request.param
    codes = ("85", "86") if means == "exit-code" else ("98", "99")
    settings = dict(zip(("RequeueExit", "RequeueExitHold"), codes, strict=True))
    view = load_view(resource("cluster-configs/p5-spot.yaml"))
    # nodes idle between two tests stay up: 10 min, scaled, are shorter than a test may take
    start = PrivateCluster.start(view, nodes=3, time_scale=0.1, settings={**settings, "SuspendTime": "3600"})
    with start as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield Site(cluster, means)


Submit = Callable[..., tuple[str, RunDir]]


@pytest.fixture
def submit(site: Site, tmp_path: Path) -> Iterator[Submit]:
    """Return `submit(*words)`, which submits a job whose attempts end as the words say; cancels them at the end."""
    submitted: list[str] = []

    def submit(*words: str, run: RunDir | None = None, max_stalled: int = 3, extra: tuple[str, ...] = ()) -> Any:
        run = run or RunDir(tmp_path / "my run")
        (tmp_path / "play.py").write_text(PLAY)
        script = SCRIPT.format(
            pctool=f"{sys.executable} -m pctool",
            python=sys.executable,
            play=tmp_path / "play.py",
            run=run.path,
            words=" ".join(words),
            max_stalled=max_stalled,
        )
        argv = [
            "sbatch",
            "--parsable",
            f"--comment={format_comment(str(run.path).replace(TASK, '%a'))}",
            f"--output={tmp_path}/o-%j",
            *extra,
        ]
        done = subprocess.run(argv, input=script, text=True, capture_output=True, check=True, timeout=60)
        submitted.append(done.stdout.strip())
        return submitted[-1], run

    yield submit
    subprocess.run(["scancel", *submitted], check=True, timeout=60)
    for job_id in submitted:
        wait_for(lambda job_id=job_id: state(job_id) in {None, "CANCELLED", "COMPLETED", "FAILED"})  # type: ignore[misc]


def wait_for(true: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Return what `true` returns as soon as it is true; fail after a long time."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
    return found


def ended_or(job_id: str, true: Callable[[JobInfo], Any]) -> JobInfo | None:
    """Return the job once something is true of it; fail at once when it has ended, for that would stay so."""
    job = query.show_job(job_id)
    if job and true(job):
        return job
    assert job is not None
    assert phase(job.state) is not Phase.ENDED, job
    return None


def nudged_until(job_id: str, true: Callable[[JobInfo], Any]) -> JobInfo:
    """Nudge each restart of the job once, as `nudge --watch` does, until something is true of it."""
    nudged: set[tuple[str, int]] = set()

    def look() -> JobInfo | None:
        nudged.update((one.job.job_id, one.job.restarts) for one in nudge([job_id], done=nudged))
        return ended_or(job_id, true)

    found = wait_for(look)
    assert isinstance(found, JobInfo)
    return found


def is_held(job: JobInfo) -> bool:
    return job.held and phase(job.state) is Phase.PENDING


def state(job_id: str) -> str | None:
    job = query.show_job(job_id)
    return job.state if job else None


def events(run: RunDir, name: str) -> list[Event]:
    return [event for event in Ledger(run.ledger).read() if event.event == name]


def by_id(job_id: str, tmp_path: Path) -> Found:
    return find_run(job_id, jobs=tmp_path / "none")


def test_a_lost_node_is_requeued_and_a_nudge_ends_the_wait(site: Site, submit: Submit, tmp_path: Path) -> None:
    job_id, run = submit("lost", "done")
    done = wait_for(lambda: nudge([job_id]))
    assert done[0].error is None
    wait_for(lambda: state(job_id) == "COMPLETED")
    first, second = events(run, "decided")
    assert (first.fields["cause"], first.fields["requeue"]) == ("peer-lost", site.means)
    assert first.fields["srun_code"] != 0
    assert (second.fields["cause"], second.fields["requeue"]) == ("done", "none")
    table = attempts_of(run, alive=False)
    assert [(row.attempt, row.job_id, row.restart, row.cause) for row in table] == [
        (0, job_id, 0, "peer-lost"),
        (1, job_id, 1, "done"),
    ]
    assert by_id(job_id, tmp_path).run == run


def test_a_requeue_without_a_nudge_waits(site: Site, submit: Submit) -> None:
    job_id, run = submit("stop", "done")
    waiting = wait_for(
        lambda: (job := query.show_job(job_id)) and job.restarts == 1 and phase(job.state) is Phase.PENDING and job
    )
    found = status_of(Found(run=run, job_id=job_id, job=waiting))
    assert found.next_start == waiting.eligible_time
    wait_for(lambda: state(job_id) == "COMPLETED")
    assert events(run, "claim")[1].time >= waiting.eligible_time


def test_a_program_error_fails_the_job_with_its_own_code(site: Site, submit: Submit) -> None:
    job_id, run = submit("program-error")
    wait_for(lambda: state(job_id) == "FAILED")
    job = query.show_job(job_id)
    assert job is not None
    assert (job.exit_code, job.restarts) == (7, 0)
    assert events(run, "decided")[0].fields["requeue"] == "none"


def test_stalled_attempts_are_held_with_the_reason_until_released(site: Site, submit: Submit, tmp_path: Path) -> None:
    job_id, run = submit("stop", "stop", "done", max_stalled=2)
    held = nudged_until(job_id, is_held)
    comment = parse_comment(held.comment)
    assert comment is not None
    assert comment.run_dir == str(run.path)
    assert "2 attempts in a row" in comment.note
    found = by_id(job_id, tmp_path)
    assert "2 attempts in a row" in (status_of(found).held or "")
    assert nudge([job_id]) == []
    assert state(job_id) in {"PENDING", "SPECIAL_EXIT"}
    subprocess.run(["scontrol", "release", job_id], check=True, timeout=60)
    nudged_until(job_id, lambda job: job.state == "COMPLETED")
    assert run.attempt_numbers() == [0, 1, 2]
    ended = query.show_job(job_id)
    assert ended is not None
    assert ended.comment == format_comment(str(run.path))


def test_a_task_of_an_array_is_requeued_and_held_alone(site: Site, submit: Submit, tmp_path: Path) -> None:
    """The id of the task that starts last is that of the whole array, and Slurm would act on every task."""
    word = f"$(((({TASK})) && echo lost) || echo sleep)"
    array, pattern = submit(
        word, run=RunDir(tmp_path / f"run-{TASK}"), max_stalled=2, extra=("--nodes=1", "--array=0-1")
    )
    runs = [RunDir(Path(str(pattern.path).replace(TASK, str(task)))) for task in range(2)]
    wait_for(lambda: runs[1].attempt_numbers())
    claim = read_claim(runs[1].attempt(0))
    assert claim is not None
    assert (claim.job_id, claim.task) == (array, f"{array}_1")
    held = wait_for(lambda: (job := query.show_job(f"{array}_1")) and is_held(job) and job)
    assert runs[1].attempt_numbers() == [0, 1]
    assert "2 attempts in a row" in held.comment
    other = query.show_job(f"{array}_0")
    assert other is not None
    assert (other.state, other.restarts, runs[0].attempt_numbers()) == ("RUNNING", 0, [0])
    assert other.comment == format_comment(str(pattern.path).replace(TASK, "%a"))


def test_a_restart_whose_run_directory_is_gone_is_held(site: Site, submit: Submit, tmp_path: Path) -> None:
    job_id, run = submit("stop", "done")
    wait_for(lambda: (job := query.show_job(job_id)) and job.restarts == 1)
    run.path.rename(tmp_path / "unmounted")
    held = nudged_until(job_id, is_held)
    comment = parse_comment(held.comment)
    assert comment is not None
    assert "is not there" in comment.note
    assert not run.path.exists()
    (tmp_path / "unmounted").rename(run.path)
    subprocess.run(["scontrol", "release", job_id], check=True, timeout=60)
    nudged_until(job_id, lambda job: job.state == "COMPLETED")
    assert run.attempt_numbers() == [0, 1]


def test_a_second_job_never_takes_a_live_run(site: Site, submit: Submit, tmp_path: Path) -> None:
    first, run = submit("sleep")
    wait_for(lambda: run.attempt_numbers() == [0])
    second, _ = submit("done", run=run, extra=("--nodes=1",))
    wait_for(lambda: state(second) == "FAILED")
    assert f"held by job {first}" in (tmp_path / f"o-{second}").read_text()
    assert query.show_job(second).exit_code == 3  # type: ignore[union-attr]
    assert state(first) == "RUNNING"
    assert run.attempt_numbers() == [0]


@pytest.mark.parametrize("requeue", [False, True])
def test_stop_ends_or_goes_on(site: Site, submit: Submit, tmp_path: Path, requeue: bool) -> None:
    job_id, run = submit("sleep", "done")
    wait_for(lambda: run.attempt_numbers() == [0] and state(job_id) == "RUNNING")
    assert request_stop(by_id(job_id, tmp_path), who="ada", requeue=requeue).slow is None
    nudged_until(job_id, lambda job: job.state == "COMPLETED")
    assert len(run.attempt_numbers()) == (2 if requeue else 1)
    stop = read_stop(run.attempt(0))
    assert stop is not None
    assert (stop.why, stop.who, stop.requeue) == ("user", "ada", requeue)
    assert events(run, "decided")[0].fields["requeue"] == (site.means if requeue else "none")


def test_scancel_neither_requeues_nor_decides(site: Site, submit: Submit) -> None:
    job_id, run = submit("sleep")
    wait_for(lambda: run.attempt_numbers() == [0] and state(job_id) == "RUNNING")
    subprocess.run(["scancel", job_id], check=True, timeout=60)
    wait_for(lambda: state(job_id) == "CANCELLED")
    assert all(event.fields["requeue"] == "none" for event in events(run, "decided"))
    assert query.show_job(job_id).restarts == 0  # type: ignore[union-attr]


def test_a_job_that_may_not_be_requeued_is_not(site: Site, submit: Submit) -> None:
    job_id, run = submit("stop", extra=("--no-requeue",))
    wait_for(lambda: state(job_id) == "FAILED")
    assert query.show_job(job_id).exit_code == 4  # type: ignore[union-attr]
    (decided,) = events(run, "decided")
    assert "--no-requeue" in decided.fields["why"]


def test_the_first_claim_knows_its_nodes_and_a_hub_they_reach(site: Site, submit: Submit) -> None:
    job_id, run = submit("done")
    wait_for(lambda: state(job_id) == "COMPLETED")
    claim = read_claim(run.attempt(0))
    assert claim is not None
    assert set(claim.nodes) <= set(site.cluster.node_names)
    assert len(claim.nodes) == 2
    host, _, port = claim.hub.partition(":")
    assert host == query.node_addr(claim.nodes[0])
    assert 1024 <= int(port) < 65536
    settings = query.config()
    assert claim.cluster == f"{settings['ClusterName']}@{settings['SlurmctldHost[0]']}"
    assert (claim.means, claim.requeue) == (site.means, True)


def test_doctor_sees_a_node(site: Site, tmp_path: Path) -> None:
    checks = {check.name: check for check in examine(Options(run_dir=tmp_path / "new" / "run", python=sys.executable))}
    assert checks["munge"].status == "ok"
    assert checks["slurmctld"].status == "ok"
    assert checks["run directory"].status == "ok"
    assert checks["instance metadata"].status == "ok"
    assert checks["instance metadata"].found.startswith("i-")
    assert checks["RequeueExit"].status == ("ok" if site.means == "exit-code" else "warn")
    assert not (tmp_path / "new").exists()
    json.dumps([check.found for check in checks.values()])


def test_doctor_tells_of_a_silent_metadata_service(site: Site) -> None:
    for node in site.cluster.node_names:
        site.cluster.imds_fault(node, "refuse-token")
    try:
        (found,) = [check for check in examine(Options()) if check.name == "instance metadata"]
    finally:
        for node in site.cluster.node_names:
            site.cluster.imds_fault(node, None)
    assert found.status == "warn"
    assert "spot notices are not heard of" in found.found
