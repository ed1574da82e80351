"""Submission to a real private Slurm: what is made, what is refused, and how the batch script behaves there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import FailedJobError

from pctool.cluster.view import load_view
from pctool.errors import RunInUseError, SlurmError, UsageError
from pctool.facts.resources import resource
from pctool.job.find import find_run, jobs_file
from pctool.job.nudge import nudge
from pctool.job.plan import make_plan
from pctool.job.stop import request_stop
from pctool.job.submit import execute, submit
from pctool.job.submitted import SubmittedJob
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes
from pctool.run.stop import read_stop
from pctool.slurm import query
from pctool.slurm.comment import parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.private import PrivateCluster
from pctool.slurm.view import live_view
from pctool.spec.job import JobSpec

pytestmark = pytest.mark.slurm

# A template of one's own that runs the script with bash: what is tested here is submission, not training.
PLAIN = """#!/bin/bash
#SBATCH --job-name={{ job.name | sbatch }}
#SBATCH --comment={{ comment | sbatch }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --output={{ output | sbatch }}
{% if job.array %}
#SBATCH --array={{ job.array | sbatch }}
{% endif %}
{% if job.constraint %}
#SBATCH --constraint={{ job.constraint | sbatch }}
{% endif %}
bash {{ job.command | sh_words }}
"""

# Stands for `python -m pctool`: the batch script's own flow is tested here, not what claim, launch and decide do.
FAKE = """#!/bin/bash
case "$3" in
  claim) mkdir -p "$4/attempts/000000"; echo "export PCTOOL_RUN_DIR='$4' PCTOOL_ATTEMPT=0" ;;
  launch) echo "launch $SLURM_NODEID ${SLURM_CPUS_PER_TASK:-} ${VALUE:-} $*"
          until [[ -e "$PCTOOL_RUN_DIR/attempts/000000/stop" || -n "${NO_WAIT:-}" ]]; do sleep 0.1; done
          exit "${CODE:-0}" ;;
  decide) echo "decide $*"; exit "$6" ;;
esac
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateCluster]:
    view = load_view(resource("cluster-configs/p5-spot.yaml"))
    # nodes idle between two tests stay up: 10 min, scaled, are shorter than a test may take
    start = PrivateCluster.start(view, nodes=2, time_scale=0.1, settings={"SuspendTime": "3600"})
    with start as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.env.items():
            patch.setenv(name, value)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield running


@pytest.fixture
def folder(cluster: PrivateCluster, tmp_path: Path) -> Path:
    (tmp_path / "plain.j2").write_text(PLAIN)
    (tmp_path / "train.sh").write_text("echo hello\n")
    return tmp_path


def job(folder: Path, script: str = "echo hello", **changes: Any) -> JobSpec:
    (folder / "train.sh").write_text(script + "\n")
    values: dict[str, Any] = {
        "name": "a job",
        "command": (str(folder / "train.sh"),),
        "run_dir": str(folder / "runs" / "one run"),
        "template": str(folder / "plain.j2"),
    }
    return JobSpec(**{**values, **changes})


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_job_runs_and_is_followed_without_accounting(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    submitted = submit(job(folder, nodes=2))
    assert submitted.state in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED"}
    assert submitted.result() == Path(submitted.run_dir) == folder / "runs" / "one run"
    assert (submitted.state, submitted.done()) == ("COMPLETED", True)
    assert submitted.stdout() == "hello\n"
    run = RunDir(Path(submitted.run_dir))
    assert [event.fields for event in Ledger(run.ledger).read() if event.event == "submitted"] == [
        {"job_id": submitted.job_id}
    ]
    assert run.job_toml.exists()
    assert vars(submitted.submission().function)["command"] == [str(folder / "train.sh")]
    index = Path(os.environ["XDG_STATE_HOME"], "pctool", "jobs.jsonl").read_text().splitlines()
    assert json.loads(index[-1]) == {"job_id": submitted.job_id, "run_dir": submitted.run_dir}
    assert "sacct" not in "".join(capfd.readouterr())


def test_the_run_directory_is_found_from_the_job(folder: Path) -> None:
    submitted = submit(job(folder))
    info = query.show_job(submitted.job_id)
    submitted.wait()
    assert info is not None
    comment = parse_comment(info.comment)
    assert comment is not None
    assert comment.run_dir == submitted.run_dir


def test_a_failed_job_says_why(folder: Path) -> None:
    submitted = submit(job(folder, "echo no luck; exit 3"))
    with pytest.raises(FailedJobError, match=r"ended FAILED: exit code 3\n(.*\n)*no luck"):
        submitted.result()


def test_the_ledger_tells_the_end_of_a_job_slurm_has_forgotten(folder: Path) -> None:
    submitted = submit(job(folder))
    submitted.wait()
    ledger = Ledger(RunDir(Path(submitted.run_dir)).ledger)
    forgotten = type(submitted)(submitted.paths.folder, "99999", run_dir=submitted.run_dir, output=submitted.output)
    assert (forgotten.state, forgotten.done()) == ("FAILED", True)
    ledger.append("claim", attempt=0, job_id="99999")
    ledger.append("decided", attempt=0, code=0, cause="done", why="", requeue="none")
    again = type(submitted)(submitted.paths.folder, "99999", run_dir=submitted.run_dir, output=submitted.output)
    assert again.state == "COMPLETED"


def test_a_second_job_in_the_same_run_directory_is_refused(folder: Path) -> None:
    first = submit(job(folder, "sleep 60"))
    try:
        with pytest.raises(RunInUseError, match=f"job {first.job_id} ") as caught:
            submit(job(folder, "sleep 60"))
        assert caught.value.exit_code == 3
    finally:
        first.cancel()
    first.wait()
    assert submit(job(folder)).result() == Path(first.run_dir)


def test_a_refused_job_leaves_nothing_behind(folder: Path) -> None:
    spec = job(folder, constraint="nosuchfeature", output=str(folder / "out" / "%j.txt"))
    before = tree(folder)
    with pytest.raises(SlurmError, match="Invalid feature specification") as caught:
        submit(spec)
    assert caught.value.exit_code == 3
    assert tree(folder) == before


def test_a_refused_job_leaves_an_older_run_as_it_was(folder: Path) -> None:
    submit(job(folder)).wait()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SlurmError, match="Invalid feature specification"):
        submit(job(folder, constraint="nosuchfeature"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"partition": "p5sopt"}, "no partition"),
        ({"nodes": 3}, "asks for 3 nodes"),
        ({"gpus_per_node": 9}, "at most 8"),
    ],
)
def test_what_the_cluster_lacks_is_refused_before_anything_is_made(
    folder: Path, changes: dict[str, Any], what: str
) -> None:
    before = tree(folder)
    with pytest.raises(UsageError, match=what):
        submit(job(folder, **changes))
    assert tree(folder) == before


def test_a_run_directory_that_cannot_be_made_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        submit(job(folder, run_dir=str(folder / "train.sh" / "run")))


def test_an_array_is_a_run_a_task(folder: Path) -> None:
    submitted = submit(job(folder, "echo task $SLURM_ARRAY_TASK_ID", array="1,3"))
    assert submitted.results() == [folder / "runs/one run/task-1", folder / "runs/one run/task-3"]
    assert [task.stdout() for task in submitted.array_jobs] == ["task 1\n", "task 3\n"]
    for task in submitted.array_jobs:
        events = Ledger(RunDir(Path(task.run_dir)).ledger).read()
        assert [event.fields["job_id"] for event in events] == [task.job_id]


def test_the_live_cluster_is_seen_as_configured(cluster: PrivateCluster) -> None:
    (queue,) = live_view().queues
    (nodes,) = queue.compute_resources
    assert (queue.name, queue.default, queue.max_nodes) == ("p5spot", True, 2)
    assert (nodes.name, nodes.cpus, nodes.gpus, nodes.gpu_type) == ("p5", 192, 8, "h100")
    assert nodes.instance_types == ("p5.48xlarge",)


def fake_pctool(folder: Path) -> str:
    path = folder / "python"
    path.write_text(FAKE)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_script(folder: Path, **changes: Any) -> Any:
    spec = job(folder, template=None, **changes)
    return execute(make_plan(spec, view=live_view(), interpreter=fake_pctool(folder)))


@pytest.mark.parametrize("code", [0, 7])
def test_the_script_runs_one_launch_a_node_and_ends_as_decide_says(folder: Path, code: int) -> None:
    environment = {"NO_WAIT": "1", "CODE": str(code), "VALUE": "it's"}
    submitted = run_script(folder, nodes=2, gpus_per_node=8, cpus_per_task=96, environment=environment)
    submitted.wait()
    lines = sorted((submitted.stdout() or "").splitlines())
    script = folder / "train.sh"
    launches = [line for line in lines if line.startswith("launch")]
    # a task that fails takes the others along: then only the first is sure to have been heard
    assert launches[0].split(" ", 2)[2] == f"96 it's -m pctool launch --nproc-per-node 8 -- {script}"
    assert len(launches) == 2 or code
    assert f"decide -m pctool decide {submitted.run_dir} --srun-code {code}" in lines
    assert submitted.state == ("FAILED" if code else "COMPLETED")


def test_a_signal_to_the_batch_script_leaves_the_stop_note_and_the_step_ends_by_itself(folder: Path) -> None:
    submitted = run_script(folder, nodes=2, time="10", environment={"CODE": "0"})
    wait_for(lambda: len([line for line in (submitted.stdout() or "").splitlines() if "launch" in line]) == 2)
    info = query.show_job(submitted.job_id)
    subprocess.run(["scancel", "--batch", "--signal=USR1", submitted.job_id], check=True)
    submitted.wait()
    note = json.loads((Path(submitted.run_dir) / "attempts/000000/stop").read_text())
    assert info is not None
    assert note == {"why": "time-limit", "who": "slurm", "deadline": info.end_time, "requeue": True}
    assert "--srun-code 0" in (submitted.stdout() or "")
    assert submitted.state == "COMPLETED"


@pytest.mark.parametrize("signal", ["B:USR2@60", "B:TERM@60"])
def test_pctool_stop_is_understood_whatever_signal_announces_the_time_limit(folder: Path, signal: str) -> None:
    submitted = run_script(folder, signal=signal, time="10")
    wait_for(lambda: "launch" in (submitted.stdout() or ""))
    stop_by_verb(query_job(submitted.job_id))
    submitted.wait()
    assert "--srun-code 0" in (submitted.stdout() or "")
    assert submitted.state == "COMPLETED"


def test_a_stop_of_one_task_leaves_the_others_of_its_array_alone(folder: Path) -> None:
    submitted = run_script(folder, array="0-1", cpus_per_task=192, time="10")
    namesake, other = running_tasks(submitted)
    stop_by_verb(namesake)
    wait_for(lambda: task_of(submitted, namesake).done())
    time.sleep(2.0)  # what a signal to the whole array would have needed
    assert query_job(other.label).state == "RUNNING"
    assert read_stop(RunDir(Path(task_of(submitted, other).run_dir)).attempt(0)) is None
    stop_by_verb(other)
    submitted.wait()
    assert [task.state for task in submitted.array_jobs] == ["COMPLETED", "COMPLETED"]


def test_the_note_of_the_task_that_has_its_array_s_id_knows_when_the_job_ends(folder: Path) -> None:
    submitted = run_script(folder, array="0-1", cpus_per_task=192, time="10")
    namesake, other = running_tasks(submitted)
    subprocess.run(["scancel", "--batch", "--signal=USR1", namesake.label], check=True)
    stop = RunDir(Path(task_of(submitted, namesake).run_dir)).attempt(0)
    wait_for(stop.stop.exists)
    note = read_stop(stop)
    stop_by_verb(other)
    submitted.wait()
    assert note is not None
    assert (note.why, note.deadline) == ("time-limit", namesake.end_time)


def test_a_task_is_nudged_while_another_of_its_array_runs(folder: Path) -> None:
    submitted = submit(job(folder, "sleep 60", array="0-1"))
    try:
        namesake, other = running_tasks(submitted, said="")
        subprocess.run(["scontrol", "requeue", namesake.label], check=True)
        wait_for(lambda: query_job(namesake.label).reason == "BeginTime")
        (done,) = nudge([namesake.label])
        assert (done.error, done.job.label) == (None, namesake.label)
        assert query_job(other.label).state == "RUNNING"
    finally:
        submitted.cancel()
    submitted.wait()


def test_after_a_requeue_the_attempt_before_is_not_stopped(folder: Path) -> None:
    submitted = run_script(folder, time="10")
    try:
        wait_for(lambda: "launch" in (submitted.stdout() or ""))
        claim_for(query_job(submitted.job_id))
        subprocess.run(["scontrol", "requeue", submitted.job_id], check=True)
        wait_for(lambda: query_job(submitted.job_id).state == "RUNNING" and query_job(submitted.job_id).restarts == 1)
        with pytest.raises(UsageError, match="not claimed its attempt yet"):
            request_stop(find_run(submitted.job_id, jobs=jobs_file({})), who="ada", requeue=False)
        assert not (Path(submitted.run_dir) / "attempts/000000/stop").exists()
    finally:
        submitted.cancel()
    submitted.wait()


def test_a_job_with_a_comment_of_its_own_is_stopped_by_its_run(folder: Path) -> None:
    submitted = run_script(folder, time="10")
    wait_for(lambda: "launch" in (submitted.stdout() or ""))
    claim_for(query_job(submitted.job_id))
    subprocess.run(["scontrol", "update", f"JobId={submitted.job_id}", "Comment=my own words"], check=True)
    request_stop(find_run(submitted.run_dir, jobs=jobs_file({})), who="ada", requeue=False)
    submitted.wait()
    assert submitted.state == "COMPLETED"


def query_job(job_id: str) -> JobInfo:
    found = query.show_job(job_id)
    assert found is not None
    return found


def running_tasks(submitted: SubmittedJob, said: str = "launch") -> tuple[JobInfo, JobInfo]:
    """Wait until both tasks run (and have said a word); return the one whose id is the array's own, then the other."""
    tasks = submitted.array_jobs
    wait_for(lambda: all(query_job(one.job_id).state == "RUNNING" and said in (one.stdout() or "") for one in tasks))
    found = [query_job(one.job_id) for one in tasks]
    (namesake,) = [one for one in found if one.job_id == one.array_job_id]
    (other,) = [one for one in found if one.job_id != one.array_job_id]
    return namesake, other


def task_of(submitted: SubmittedJob, found: JobInfo) -> SubmittedJob:
    return next(one for one in submitted.array_jobs if one.job_id == found.label)


def claim_for(found: JobInfo) -> None:
    """Write the claim of the first attempt, which the stand-in for claim leaves out."""
    run = find_run(found.label, jobs=jobs_file({})).run
    claim = Claim(job_id=found.job_id, restart=0, nonce="n", host="a", nodes=("a",), time=time.time(), hub="a:1")
    run.attempt(0).claim.write_bytes(claim_bytes(claim))


def stop_by_verb(found: JobInfo) -> None:
    """Ask for a stop as `pctool stop` does."""
    claim_for(found)
    stopping = request_stop(find_run(found.label, jobs=jobs_file({})), who="ada", requeue=False)
    assert (stopping.job_id, stopping.slow) == (found.label, None)


def test_the_command_line_prints_the_id_as_sbatch_does_and_refuses_the_second(folder: Path) -> None:
    (folder / "train.sh").write_text("sleep 60\n")
    argv = [sys.executable, "-m", "pctool", "submit", "--parsable", "--template", str(folder / "plain.j2")]
    argv += ["--run-dir", str(folder / "cli"), "-N", "2", "--", "train.sh"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    job_id = done.stdout.strip()
    try:
        assert query.show_job(job_id) is not None
        again = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        assert (again.returncode, again.stdout) == (3, "")
        assert f"job {job_id} " in again.stderr
        assert "Traceback" not in again.stderr
    finally:
        subprocess.run(["scancel", job_id], check=True)


def wait_for(condition: Any, *, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.1)
