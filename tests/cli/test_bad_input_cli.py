"""Bad input to the program: what is said, the exit code, and that nothing is made. No Slurm is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pctool.facts.resources import resource
from pctool.run.layout import RunDir
from pctool.run.records import Claim, NodeExit, claim_bytes, write_node_exit

JOB = 'nodes = 2\npartition = "p5spot"\ncpus-per-task = 1\ncommand = ["train.py"]\n'
HET = f"het-group = 0\n{JOB}"
CONFIG = str(resource("cluster-configs/p5-spot.yaml"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ok.toml").write_text(JOB)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "torn.yaml").write_text("Scheduling: [1, 2\n")
    (tmp_path / "other.yaml").write_text("Region: eu-west-1\n")
    return tmp_path


def pctool(folder: Path, *words: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    # an unbuffered interpreter has nothing left to write at its end, so that faults of that would not show
    ours = ("SLURM", "SBATCH", "PCTOOL_", "PYTHONUNBUFFERED")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-m", "pctool", *words],
        cwd=folder,
        env={**clean, "PATH": "/nowhere", "XDG_STATE_HOME": str(folder / "state"), **env},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        check=False,
    )


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(
    ("job", "said", "fix"),
    [
        (JOB.replace("partition", "partitoin"), "job.toml:2: unknown key 'partitoin'", "did you mean 'partition'?"),
        (JOB.replace("train.py", "trian.py"), "trian.py is not there", "correct the path"),
        (JOB.replace("p5spot", "p5spto"), "the cluster has no partition 'p5spto'", "did you mean 'p5spot'?"),
        (JOB.replace("= 2", "= 2000"), "the job asks for 2000 nodes", "or fewer"),
        (HET, "job.toml:1: heterogeneous jobs are not supported", "one kind of node"),
        ("nodes = ", "job.toml: not valid TOML", "write keys as in"),
    ],
)
def test_a_job_that_cannot_be(folder: Path, job: str, said: str, fix: str) -> None:
    (folder / "job.toml").write_text(job)
    before = tree(folder)
    done = pctool(folder, "submit", "job.toml", "--cluster", CONFIG)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert fix in done.stderr.partition("\n  -> ")[2]
    assert "Traceback" not in done.stderr
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["folder", "binary", "empty", "absent"])
def test_a_job_file_that_is_none(folder: Path, name: str) -> None:
    done = pctool(folder, "submit", f"{name}.toml", "--cluster", CONFIG)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pctool submit: {name}.toml: ")
    assert "\n  -> " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-p", "p5spto"), "did you mean 'p5spot'?"),  # before a Slurm is looked for
        (("-N", "99"), "the job asks for 99 nodes"),
        ((), "Slurm"),
    ],
)
def test_a_rehearsal_that_cannot_start_leaves_no_folder(folder: Path, flags: tuple[str, ...], said: str) -> None:
    (folder / "tmp").mkdir()
    done = pctool(folder, "rehearse", "ok.toml", "--cluster", CONFIG, *flags, TMPDIR=str(folder / "tmp"))
    assert done.returncode in {2, 3}
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "code"), [("folder", 2), ("binary", 2), ("empty", 2), ("torn", 2), ("other", 2), ("absent", 4)]
)
@pytest.mark.parametrize("verb", [("submit", "ok.toml"), ("rehearse", "ok.toml"), ("local", "up")])
def test_a_cluster_config_that_is_none(folder: Path, verb: tuple[str, ...], name: str, code: int) -> None:
    done = pctool(folder, *verb, "--cluster", f"{name}.yaml")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"pctool {verb[0]}: {name}.yaml")
    assert "\n  -> " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["status", "logs", "attempts", "stop", "nudge"])
def test_a_job_that_is_not_known(folder: Path, verb: str) -> None:
    done = pctool(folder, verb, "987654")
    assert (done.returncode, done.stdout) == (3 if verb == "nudge" else 4, "")
    assert "the command 'scontrol' is not there" in done.stderr
    assert "\n  -> " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_no_job_has_worked_on(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB)  # a folder with a job file looks like a run directory
    done = pctool(folder, "stop", ".")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no job has worked here" in done.stderr


def test_a_file_that_may_not_be_read_is_named(folder: Path) -> None:
    run = RunDir(folder / "run")
    run.ledger.mkdir(parents=True)  # not a file: reading it fails for root too
    done = pctool(folder, "attempts", str(run.path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{run.ledger}: cannot be read or written: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_verdict_gets_through_although_the_log_is_on_a_full_disk(folder: Path) -> None:
    run = RunDir(folder / "run")
    claim = Claim(job_id="7", restart=0, nonce="n", host="a", nodes=("a",), time=1.0, hub="a:1")
    run.attempt(0).nodes.mkdir(parents=True)
    run.attempt(0).claim.write_bytes(claim_bytes(claim))
    write_node_exit(run.attempt(0), NodeExit(node="a", cause="program-error", code=7, time=1.0))
    with open("/dev/full", "w") as full:
        done = pctool(folder, "decide", str(run.path), "--attempt", "0", stderr=full.fileno(), SLURM_JOB_ID="7")
    assert done.returncode == 7
