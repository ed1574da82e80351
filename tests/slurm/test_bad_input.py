"""Jobs that cannot work, on a real private Slurm: they end at once with the right code, and say why in their output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pctool.cluster.view import load_view
from pctool.facts.resources import resource
from pctool.job.attempts import attempts_of
from pctool.job.plan import make_plan
from pctool.job.submit import execute, submit
from pctool.job.submitted import SubmittedJob
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.slurm import query
from pctool.slurm.private import PrivateCluster
from pctool.slurm.view import live_view
from pctool.spec.job import JobSpec

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 60.0  # only a job that does not end takes so long


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


def spec(folder: Path, script: str, *, nodes: int = 1, python: str | None = None) -> JobSpec:
    path = folder / "train.py"
    path.write_text(script)
    return JobSpec(
        name="bad", command=(str(path),), nodes=nodes, python=python, cpus_per_task=1, run_dir=str(folder / "run")
    )


def ended(job: SubmittedJob) -> tuple[int | str | None, str]:
    """Wait, and return the job's exit code and its output."""
    end = time.monotonic() + LIMIT_S
    while not job.done():
        assert time.monotonic() < end, f"job {job.job_id} is {job.state}: requeued or held, perhaps"
        time.sleep(0.2)
    info = query.show_job(job.job_id)
    assert info is not None
    return info.exit_code, job.stdout() or ""


def decided(job: SubmittedJob) -> Event:
    return [event for event in Ledger(RunDir(Path(job.run_dir)).ledger).read() if event.event == "decided"][-1]


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("def f(:\n", 1, "SyntaxError: invalid syntax"),
        ("raise ValueError('sample 17')\n", 1, "ValueError: sample 17"),
        ("import sys\nsys.exit(85)\n", 1, "exit code 85"),  # RequeueExit's own code
        ("import sys\nsys.exit(86)\n", 1, "exit code 86"),  # RequeueExitHold's
        ("print('not one step')\n", 0, "not one step"),
    ],
)
def test_what_the_program_does_wrong_is_never_requeued(
    cluster: PrivateCluster, tmp_path: Path, script: str, code: int, said: str
) -> None:
    job = submit(spec(tmp_path, script))
    found, output = ended(job)
    assert (found, decided(job).fields["requeue"]) == (code, "none")
    assert said in output
    (attempt,) = attempts_of(RunDir(Path(job.run_dir)), alive=False)
    assert attempt.cause == ("done" if code == 0 else "program-error")


def test_an_interpreter_without_torch(cluster: PrivateCluster, tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    job = submit(spec(tmp_path, "", nodes=2, python=str(bare)))
    found, output = ended(job)
    assert (found, decided(job).fields["cause"]) == (2, "program-error")
    assert f"the interpreter {bare} has no torch\n  -> install torch there" in output
    assert "Traceback" not in output


def test_a_run_directory_that_one_node_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = load_view(resource("cluster-configs/p5-spot.yaml"))
    with PrivateCluster.start(view, nodes=2, time_scale=0.1) as cluster:
        for name, value in {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
            monkeypatch.setenv(name, value)
        blind = cluster.node_names[1]
        cluster.set_node_env(blind, {"PCTOOL_RUN_DIR": str(tmp_path / "elsewhere")})
        job = submit(spec(tmp_path, "", nodes=2))
        found, output = ended(job)
        assert (found, decided(job).fields["cause"]) == (2, "program-error")
    assert f"node {blind} cannot see {tmp_path}/elsewhere/attempts/000000/claim.json" in output
    assert "put the run directory on a file system that all nodes share" in output
    assert "Traceback" not in output
    assert not (tmp_path / "elsewhere").exists()


def test_a_job_that_finds_its_run_in_use_leaves_the_other_alone(cluster: PrivateCluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)\n"
    job = spec(tmp_path, wait)
    first = submit(job)
    run = RunDir(Path(first.run_dir))
    end = time.monotonic() + LIMIT_S
    while not run.attempt_numbers():
        assert time.monotonic() < end, "the first job never claimed its attempt"
        time.sleep(0.05)
    second = execute(make_plan(job, view=live_view(), interpreter=sys.executable))  # submit itself would refuse
    found, output = ended(second)
    go.touch()
    assert found == 3
    assert f"this run is held by job {first.job_id} (attempt 0" in output
    assert f"`scancel {first.job_id}`" in output
    assert (ended(first)[0], run.attempt_numbers()) == (0, [0])
