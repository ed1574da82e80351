"""`pctool submit --dry-run` as a program, on a machine without a Slurm cluster. Real submissions are in tests/slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pctool.facts.resources import resource

PROGRAM = """
import json, sys
from pctool.cli.main import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


def run(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**inherited, "PATH": "/nowhere", **env},
    )


def submit(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "pctool", "submit", *argv, **env)


def test_dry_run_prints_the_plan_and_makes_nothing(folder: Path) -> None:
    done = submit(folder, "--dry-run", "-N", "4", "-p", "p5spot", "--", "train.py", "--lr", "3e-4")
    assert done.returncode == 0, done.stderr
    assert f"{folder}/runs/train/logs\n" in done.stdout
    assert "then `sbatch --parsable" in done.stdout
    assert "#SBATCH --nodes=4\n" in done.stdout
    assert "warning: not checked against a cluster: the command 'scontrol' is not there" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_dry_run_as_json_is_the_plan(folder: Path) -> None:
    config = str(resource("cluster-configs/p5-spot.yaml"))
    done = submit(folder, "--dry-run", "--json", "--cluster", config, "-c", "8", "-p", "p5spot", "--", "train.py")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert set(plan) == {"job", "argv", "directories", "files", "script", "warnings"}
    assert plan["job"]["partition"] == "p5spot"
    assert plan["script"].startswith("#!/bin/bash\n")
    assert not any("not checked" in warning for warning in plan["warnings"])


def test_dry_run_and_render_have_the_same_script(folder: Path) -> None:
    argv = ["-N", "2", "-c", "8", "--", "train.py"]
    rendered = run(folder, "-m", "pctool", "render", *argv)
    assert json.loads(submit(folder, "--dry-run", "--json", *argv).stdout)["script"] == rendered.stdout


def test_dry_run_imports_nothing_it_does_not_need(folder: Path) -> None:
    done = run(folder, "-c", PROGRAM, "submit", "--dry-run", "-N", "2", "--", "train.py")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stderr.splitlines()[-1])
    assert seen["code"] == 0
    heavy = {"torch", "numpy", "boto3", "botocore", "awscrt", "submitit", "rich", "yaml", "moto"}
    assert heavy.isdisjoint(seen["modules"])
    ours = {".".join(name.split(".")[:2]) for name in seen["modules"] if name.startswith("pctool.")}
    assert ours.isdisjoint({"pctool.rehearsal", "pctool.node", "pctool.train", "pctool.aws", "pctool.cluster"})


def test_variables_that_sbatch_obeys_are_warned_of(folder: Path) -> None:
    done = submit(folder, "--dry-run", "--", "train.py", SBATCH_PARTITION="other")
    assert "sbatch obeys these variables of your environment rather than the script: SBATCH_PARTITION" in done.stderr


def test_without_slurm_a_submission_is_refused_and_makes_nothing(folder: Path) -> None:
    done = submit(folder, "-N", "2", "--", "train.py")
    assert (done.returncode, done.stdout) == (3, "")
    assert "the command 'scontrol' is not there" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_run_directory_in_the_way_is_refused(folder: Path) -> None:
    done = submit(folder, "--dry-run", "--run-dir", "train.py/run", "--", "train.py")
    assert done.returncode == 2
    assert f"run-dir cannot be made: {folder}/train.py is not a folder" in done.stderr
