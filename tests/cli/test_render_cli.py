"""`pctool render` as a program: standard output is the script, errors have their codes, files and lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = 'command = ["train.py", "--lr", "3e-4"]\nnodes = 2\npartition = "p5spot"\ncpus-per-task = 8\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def render(folder: Path, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pctool", "render", *argv],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "SLURM_CONF"},
    )


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}


def test_the_script_goes_to_standard_output_and_warnings_do_not(folder: Path) -> None:
    done = render(folder, "job.toml", "--run-dir", "/tmp/runs/x")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("warning: run-dir /tmp/runs/x ")


def test_rendering_makes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert render(folder, "job.toml").returncode == 0
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "argv",
    [
        ("job.toml", "-N", "4", "--", "train.py", "--lr", "1"),
        ("-N", "4", "job.toml", "--", "train.py", "--lr", "1"),
        ("-N4", "-pp5spot", "-c", "8", "--", "train.py", "--lr", "1"),
    ],
)
def test_flags_and_a_command_win_over_the_file(folder: Path, argv: tuple[str, ...]) -> None:
    done = render(folder, *argv)
    assert done.returncode == 0, done.stderr
    assert {"nodes=4", "partition=p5spot", "cpus-per-task=8"} <= directives(done.stdout)
    assert f"-- {folder}/train.py --lr 1\n" in done.stdout


def test_a_job_is_read_from_standard_input(folder: Path) -> None:
    done = render(folder, "-", stdin=JOB)
    assert done.stdout == render(folder, "job.toml").stdout


def test_arguments_of_the_script_may_hold_two_dashes(folder: Path) -> None:
    done = render(folder, "job.toml", "--", "train.py", "--", "--json")
    assert f"-- {folder}/train.py -- --json\n" in done.stdout


FLAGS = [
    (("-J", "n"), "job-name=n"),
    (("-t", "1-0"), "time=1-0"),
    (("--gpus-per-node", "8"), "gpus-per-node=8"),
    (("--mem", "0"), "mem=0"),
    (("-C", "a&b"), "constraint=a&b"),
    (("-A", "team"), "account=team"),
    (("-q", "high"), "qos=high"),
    (("-a", "0-3"), "array=0-3"),
    (("-d", "afterok:1"), "dependency=afterok:1"),
    (("-D", "/fsx"), "chdir=/fsx"),
    (("-o", "/fsx/%j.out"), "output=/fsx/%j.out"),
    (("--signal", "B:USR1@60"), "signal=B:USR1@60"),
    (("--no-requeue",), "no-requeue"),
    (("--requeue",), "requeue"),
    (("--exclusive",), "exclusive"),
    (("--run-dir", "/fsx/r"), "comment=pctool:/fsx/r"),
]


@pytest.mark.parametrize(("flags", "directive"), FLAGS)
def test_flags_become_directives(folder: Path, flags: tuple[str, ...], directive: str) -> None:
    assert directive in directives(render(folder, "job.toml", *flags).stdout)


OWN_FLAGS = [
    (("--ranks-per-node", "3"), "launch --nproc-per-node 3 "),
    (("--store", "s3://bucket/x"), "export PCTOOL_STORE=s3://bucket/x\n"),
    (("--every", "7"), "export PCTOOL_EVERY=7\n"),
    (("--every", "10min"), "export PCTOOL_EVERY=10min\n"),
    (("--every", "auto"), "export PCTOOL_EVERY=auto\n"),
    (("--keep", "3"), "export PCTOOL_KEEP=3\n"),
    (("--keep-for", "7d"), "export PCTOOL_KEEP_FOR=7d\n"),
    (("--keep-every", "1000"), "export PCTOOL_KEEP_EVERY=1000\n"),
    (("--max-stalled", "9"), "--max-stalled 9"),
    (("--stop-signal", "TERM"), "--stop-signal TERM "),
    (("--srun-wait", "11"), "--wait=11 "),
    (("--python", "/opt/python"), "--python /opt/python "),
    (("--env", "A=b c"), "export A='b c'\n"),
]


@pytest.mark.parametrize(("flags", "text"), OWN_FLAGS)
def test_flags_of_our_own_reach_the_script(folder: Path, flags: tuple[str, ...], text: str) -> None:
    assert text in render(folder, "job.toml", *flags).stdout


def test_a_template_of_ones_own(folder: Path) -> None:
    (folder / "mine.j2").write_text("#!/bin/bash\n# {{ job.name }}\n")
    assert render(folder, "job.toml", "--template", "mine.j2").stdout == "#!/bin/bash\n# train\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("bad.toml",), "bad.toml:2: unknown key 'nods'\n  -> did you mean 'nodes'?"),
        (("none.toml",), "none.toml: cannot read the job file"),
        (("-N", "2"), "the job has no command"),
        (("--", "gone.py"), "gone.py is not there"),
        (("job.toml", "--signal", "nonsense"), "is not what --signal takes"),
        (("job.toml", "--every", "often"), "checkpoint.every: 'often' is not a duration"),
        (("job.toml", "--every", "0"), "checkpoint.every is 0"),
        (("job.toml", "--keep-for", "6m"), "m could be minutes or months"),
        (("job.toml", "--array", "x"), "is not what --array takes"),
        (("job.toml", "--het-group", "1"), "heterogeneous jobs are not supported"),
        (("job.toml", "--template", "none.j2"), "cannot read the template"),
        (("job.toml", "--env", "A"), "--env 'A' has no '='"),
        (("train.py", "-N", "2"), "-N stands behind train.py"),
        (("-N", "2", "train.py", "--lr", "3e-4"), "as in `-N 4 -- train.py --lr 3e-4`"),
        (("job.toml", "other.py", "--lr", "3e-4"), "--lr stands behind other.py"),
        (("--lr", "3e-4", "train.py"), "unknown flag --lr"),
        (("job.toml", "--lr=3e-4"), "unknown flag --lr=3e-4"),
        (("job.yaml",), "job.yaml: this is neither a job file nor a script"),
        (("job.toml", "extra", "--", "train.py"), "'extra' stands before `--`"),
        (("job.toml", "--cluster", "cluster.yaml", "-p", "p5sopt"), "did you mean 'p5spot'?"),
        (("job.toml", "--cluster", "cluster.yaml", "-N", "99"), "asks for 99 nodes"),
    ],
)
def test_bad_input_is_exit_code_2_and_says_what_to_do(folder: Path, argv: tuple[str, ...], said: str) -> None:
    from pctool.facts.resources import resource

    (folder / "bad.toml").write_text('command = ["train.py"]\nnods = 4\n')
    (folder / "cluster.yaml").write_text(resource("cluster-configs/p5-spot.yaml").read_text())
    done = render(folder, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_config_gives_the_cpus(folder: Path) -> None:
    from pctool.facts.resources import resource

    argv = ["--cluster", str(resource("cluster-configs/p5-spot.yaml")), "-p", "p5spot", "--gpus-per-node", "8"]
    done = render(folder, *argv, "--", "train.py")
    assert done.returncode == 0, done.stderr
