"""A batch script submitted as it stands to a real private Slurm: what runs, what is written down, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_harness import StartCluster

from pctool.cli.main import main
from pctool.job.find import find_run, jobs_file
from pctool.job.status import status_of_mine
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.private import PrivateCluster

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --job-name="my job" --nodes=1
#SBATCH --output=out-%j.txt
echo "$@" "$SLURM_JOB_NAME" "$(basename "$SLURM_SUBMIT_DIR")"
"""


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateCluster]:
    with start_cluster(settings={"SuspendTime": "-1"}, nodes=2) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.env.items():
            patch.setenv(name, value)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield running


@pytest.fixture
def folder(cluster: PrivateCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(SCRIPT)
    return tmp_path


def wait_for(job_id: str) -> None:
    """Return when Slurm has ended the job."""
    query.ask(["srun", "-n1", f"--dependency=afterany:{job_id}", "true"], timeout=120)


def test_a_script_runs_as_it_stands_and_is_followed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--json", "-c", "1", "job.sh", "--lr", "3"]) == 0
    told = json.loads(capfd.readouterr().out)
    job_id, run = told["job_id"], RunDir(Path(told["run_dir"]))
    assert run.path == folder / "runs" / f"my-job-{job_id}"
    assert told["output"] == str(folder / f"out-{job_id}.txt")
    (event,) = Ledger(run.ledger).read()
    assert (event.event, event.fields["job_id"]) == ("submitted", job_id)
    assert event.fields["argv"] == ["sbatch", "--parsable", "-c", "1", "job.sh", "--lr", "3"]
    assert event.fields["script"] == str(folder / "job.sh")
    assert (run.path / "script.sh").read_text() == SCRIPT
    wait_for(job_id)
    capfd.readouterr()
    assert main(["logs", "-f", job_id]) == 0
    assert capfd.readouterr().out == f"--lr 3 my job {folder.name}\n"
    assert main(["logs", str(run.path)]) == 0
    assert main(["status", job_id]) == 0
    assert "COMPLETED" in capfd.readouterr().out


def test_a_waiting_job_is_among_mine_and_its_log_is_not_there_yet(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--parsable", "--hold", "--run-dir", "here", "job.sh"]) == 0
    job_id = capfd.readouterr().out.strip()
    try:
        jobs = jobs_file(os.environ)
        assert find_run(job_id, jobs=jobs).run.path == folder / "here"
        assert job_id in [status.job_id for status in status_of_mine(jobs=jobs)]
        assert main(["logs", job_id]) == 4
        assert "has not written its output yet" in capfd.readouterr().err
        assert main(["submit", "--run-dir", "here", "job.sh"]) == 3
        assert f"job {job_id} (PENDING) works in this run directory" in capfd.readouterr().err
    finally:
        query.ask(["scancel", job_id])


def test_an_array_names_its_tasks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--parsable", "--array=0-1", "-o", "t-%a.txt", "job.sh", "x"]) == 0
    job_id = capfd.readouterr().out.strip()
    assert main(["logs", str(folder / "runs" / f"my-job-{job_id}")]) == 4
    assert "is a file for each task" in capfd.readouterr().err
    wait_for(job_id)
    assert main(["logs", f"{job_id}_1"]) == 0
    assert capfd.readouterr().out == f"x my job {folder.name}\n"


def test_a_wrong_directive_stops_it_at_its_place_unless_forced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.sh").write_text("#!/bin/bash\n#SBATCH -N1 --ntask=2\n")
    assert main(["submit", "bad.sh"]) == 2
    said = capfd.readouterr().err
    assert "bad.sh:2:13: option '--ntask=2' is ambiguous" in said
    assert "--force" in said
    assert main(["submit", "--force", "bad.sh"]) == 3
    assert "sbatch refused the job" in capfd.readouterr().err
    assert not (folder / "runs").exists()


def test_a_fault_that_takes_sbatch_two_lines_is_told_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "dos.sh").write_bytes(b"#!/bin/bash\n#SBATCH -N1\r\n")
    assert main(["submit", "dos.sh"]) == 2
    said = capfd.readouterr().err
    assert "dos.sh:2:12: Batch script contains DOS line breaks (\\r\\n) instead of expected UNIX line breaks" in said
    assert said.count("dos.sh") == 1


def test_what_slurm_refuses_leaves_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "-p", "nowhere", "job.sh"]) == 3
    assert "sbatch refused the job" in capfd.readouterr().err
    assert not (folder / "runs").exists()
