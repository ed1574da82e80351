"""A job of an ordinary user on a cluster that root runs: claim, decide, hold and nudge need no administrator."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pctool
from pctool.cluster.view import load_view
from pctool.facts.resources import resource
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.slurm import query
from pctool.slurm.comment import format_comment, parse_comment
from pctool.slurm.parse import JobInfo
from pctool.slurm.private import PrivateCluster

pytestmark = [pytest.mark.slurm, pytest.mark.root]

NOBODY = 65534
PACKAGE = Path(pctool.__file__).parent.parent
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("env", "HOME=/nonexistent", f"PYTHONPATH={PACKAGE}"),
)

SCRIPT = """#!/bin/bash
#SBATCH --requeue --open-mode=append
claimed=$({pctool} claim '{run}' --max-stalled 2) || exit $?
eval "$claimed"
{pctool} decide "$PCTOOL_RUN_DIR" --srun-code 1
exit $?
"""  # no launch leaves a record, so every attempt counts as a lost node


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that the ordinary user may write to; pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="pctool-nobody-"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=["exit-code", "scontrol"])
def means(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start a cluster by root that requeues and holds in one of the two ways, and return which."""
    codes = ("85", "86") if request.param == "exit-code" else ("98", "99")
    settings = dict(zip(("RequeueExit", "RequeueExitHold"), codes, strict=True))
    view = load_view(resource("cluster-configs/p5-spot.yaml"))
    # nodes idle between two tests stay up: 10 min, scaled, are shorter than a test may take
    start = PrivateCluster.start(view, nodes=1, time_scale=0.1, settings={**settings, "SuspendTime": "3600"})
    with start as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield request.param


@pytest.fixture(scope="module")
def ours() -> tuple[str, ...]:
    """Return how that user runs pctool: by this interpreter, or by the system's where this one is in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        words = (python, "-m", "pctool")
        argv = [*AS_NOBODY, *words, "claim", "--help"]
        if subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0:
            return words
    pytest.skip("neither this interpreter nor the system's can run this checkout as another user")


def wait_for(true: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Return what `true` returns as soon as it is true; fail after a long time."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
    return found


def by_nobody(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run([*AS_NOBODY, *words], input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_is_done_as_the_job_s_owner(means: str, folder: Path, ours: tuple[str, ...]) -> None:
    run = RunDir(folder / "run")
    script = SCRIPT.format(pctool=" ".join(ours), run=run.path)
    comment = format_comment(str(run.path))
    argv = ("sbatch", "--parsable", f"--comment={comment}", f"--output={folder}/out", f"--chdir={folder}")
    job_id = by_nobody(*argv, stdin=script).strip()

    def held() -> JobInfo | None:
        job = query.show_job(job_id)
        return job if job and job.held and job.state != "COMPLETING" else None

    nudged = wait_for(lambda: by_nobody(*ours, "nudge", job_id))
    assert "starts now" in nudged
    job = wait_for(held)
    assert job.user == "nobody"
    note = parse_comment(job.comment)
    assert note is not None
    assert "2 attempts in a row" in note.note
    decided = [event.fields["requeue"] for event in Ledger(run.ledger).read() if event.event == "decided"]
    assert decided == [means, means]
    by_nobody("scontrol", "release", job_id)
    wait_for(lambda: run.attempt_numbers() == [0, 1, 2])
    by_nobody("scancel", job_id)
