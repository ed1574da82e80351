"""The day-to-day verbs as processes, on run directories made by the real ledger. Slurm is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, NodeExit, claim_bytes, write_node_exit


def pctool(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pctool where no Slurm command is on PATH."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PCTOOL_"))}
    return subprocess.run(
        [sys.executable, "-m", "pctool", *words],
        env={**clean, "PATH": str(Path(sys.executable).parent), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run of two attempts: one lost a node, one is done."""
    made = RunDir(tmp_path / "my run")
    made.path.mkdir()
    ledger = Ledger(made.ledger)
    ledger.append("submitted", job_id="7")
    for number in (0, 1):
        claim = Claim(job_id="7", restart=number, nonce="n", host="a", nodes=("a", "b"), time=1.0, hub="a:1")
        made.attempt(number).nodes.mkdir(parents=True)
        made.attempt(number).claim.write_bytes(claim_bytes(claim))
        made.logs(number).mkdir(parents=True)
        (made.logs(number) / "rank-0.log").write_text(f"line of attempt {number}\n")
    ledger.append("claim", attempt=0, job_id="7", restart=0, nodes=["a", "b"], host="a")
    ledger.append("first-step", attempt=0, step=1)
    ledger.append("committed", attempt=0, name="000000-00000040", step=40, bytes=1, seconds=1, tier="posix")
    ledger.append("decided", attempt=0, code=85, cause="peer-lost", why="no record of b", requeue="exit-code")
    ledger.append("claim", attempt=1, job_id="7", restart=1, nodes=["a", "b"], host="a")
    ledger.append("resumed", attempt=1, name="000000-00000040", step=40, tier="posix", seconds=1)
    ledger.append("decided", attempt=1, code=0, cause="done", why="every node finished", requeue="none")
    return made


def test_attempts(run: RunDir) -> None:
    done = pctool("attempts", str(run.path))
    assert done.returncode == 0
    header, first, second = done.stdout.splitlines()
    assert header.split()[:5] == ["attempt", "job", "restart", "nodes", "cause"]
    assert "no record of b" in first
    assert "done" in second
    found = json.loads(pctool("attempts", str(run.path), "--json").stdout)
    assert [attempt["cause"] for attempt in found["attempts"]] == ["peer-lost", "done"]
    assert found["attempts"][0]["lost_steps"] == 0


def test_status(run: RunDir) -> None:
    done = pctool("status", str(run.path))
    assert done.returncode == 0
    assert "attempt     1 (ended: done)" in done.stdout
    assert "checkpoint  step 40" in done.stdout
    assert "Slurm could not be asked" in done.stdout
    (found,) = json.loads(pctool("status", str(run.path), "--json").stdout)["jobs"]
    assert (found["job_id"], found["state"], found["checkpoint"]["step"]) == ("7", "unknown", 40)


def test_logs(run: RunDir) -> None:
    done = pctool("logs", str(run.path))
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("==>")] == ["line of attempt 0", "line of attempt 1"]
    assert pctool("logs", "-n", "1", str(run.path)).stdout == "line of attempt 1\n"
    assert pctool("logs", "-f", "-n", "1", str(run.path)).stdout == "line of attempt 1\n"  # it is over: follow ends
    assert pctool("logs", "-n", "0", str(run.path)).stdout == ""
    for words in (("-n", "-5"), ("-f", "--lines=-5")):
        negative = pctool("logs", *words, str(run.path))
        assert (negative.returncode, negative.stdout) == (2, "")
        assert "--lines -5: " in negative.stderr
        assert "Traceback" not in negative.stderr
    missing = pctool("logs", "-r", "5", str(run.path))
    assert (missing.returncode, missing.stdout) == (4, "")
    assert "no attempt has a log of rank 5" in missing.stderr


@pytest.mark.parametrize("verb", ["attempts", "status", "logs", "stop"])
def test_a_run_that_is_not_there(verb: str, tmp_path: Path) -> None:
    done = pctool(verb, str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no run directory here" in done.stderr
    assert "Traceback" not in done.stderr
    unknown = pctool(verb, "123", XDG_STATE_HOME=str(tmp_path))
    assert unknown.returncode == 4
    assert "job 123 is not found" in unknown.stderr


def test_a_job_that_slurm_has_forgotten(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "pctool").mkdir()
    record = json.dumps({"job_id": "7", "run_dir": str(run.path)})
    (tmp_path / "pctool" / "jobs.jsonl").write_text(record + "\n")
    done = pctool("attempts", "7", "--json", XDG_STATE_HOME=str(tmp_path))
    assert len(json.loads(done.stdout)["attempts"]) == 2


@pytest.mark.parametrize("words", [("status",), ("nudge",), ("nudge", "7"), ("stop", "RUN"), ("doctor", "--json")])
def test_without_slurm(run: RunDir, words: tuple[str, ...]) -> None:
    done = pctool(*(str(run.path) if word == "RUN" else word for word in words))
    assert done.returncode == (1 if words[0] == "doctor" else 3)
    assert "is not there" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_resume(run: RunDir) -> None:
    refused = pctool("resume", str(run.path), "--from", "30")
    assert refused.returncode == 4
    assert "no complete checkpoint is at step 30" in refused.stderr
    assert pctool("resume", str(run.path), "--from", "-1").returncode == 2
    done = pctool("resume", str(run.path), "--from", "0")
    assert done.returncode == 0
    assert "goes on from the beginning" in done.stdout
    assert Ledger(run.ledger).read()[-1].event == "accepted"


def test_claim_and_decide_outside_a_batch_script(run: RunDir) -> None:
    for verb in ("claim", "decide"):
        done = pctool(verb, str(run.path))
        assert (done.returncode, done.stdout) == (2, "")
        assert "batch script" in done.stderr


def test_decide_without_a_requeue(run: RunDir) -> None:
    for node in ("a", "b"):
        write_node_exit(run.attempt(1), NodeExit(node=node, cause="stop", code=0, time=1.0, saved=True))
    env = {"SLURM_JOB_ID": "7", "PCTOOL_ATTEMPT": "1", "PCTOOL_NONCE": "n"}
    done = pctool("decide", str(run.path), "--srun-code", "0", "--no-requeue", **env)
    assert (done.returncode, done.stdout) == (4, "")
    assert "attempt 1: stop, no requeue, exit 4" in done.stderr
    assert pctool("decide", str(run.path), **{**env, "PCTOOL_NONCE": "other"}).returncode == 3


def test_doctor_does_not_look_from_a_node_it_may_not_start(run: RunDir) -> None:
    done = pctool("doctor", "--no-node", "--run-dir", str(run.path))
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("verb", ["attempts", "status", "logs", "nudge", "stop", "resume", "doctor", "claim", "decide"])
def test_help_has_an_example_and_imports_nothing_heavy(verb: str) -> None:
    code = (
        "import sys; from pctool.cli.main import main\n"
        f"try: main([{verb!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'boto3', 'submitit', 'jinja2', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "example:" in done.stdout
