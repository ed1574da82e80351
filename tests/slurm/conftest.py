"""A running private cluster for tests that only need one, and a way to start others. Never skipped."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pctool.cluster.view import load_view
from pctool.errors import SlurmError
from pctool.slurm.install import find_install
from pctool.slurm.private import PrivateCluster

CONFIG = Path(__file__).parents[2] / "cluster-configs" / "p5-spot.yaml"
SCALE = 0.05  # SlurmdTimeout 9 s, clustermgtd's period 3 s, KillWait 2 s

StartCluster = Callable[..., PrivateCluster]


@pytest.fixture(scope="session")
def start_cluster() -> StartCluster:
    """Return PrivateCluster.start for the shipped config; a missing Slurm fails the test and says what to install."""
    try:
        install = find_install()
    except SlurmError as error:
        pytest.fail(str(error))

    def start(**options: Any) -> PrivateCluster:
        return PrivateCluster.start(load_view(CONFIG), **{"install": install, "time_scale": SCALE, **options})

    return start


@pytest.fixture(scope="session")
def private_cluster(start_cluster: StartCluster) -> Iterator[PrivateCluster]:
    """Give a running cluster of four nodes that never power down. Don't kill its nodes: others use it too."""
    with start_cluster(settings={"SuspendTime": "-1"}) as cluster:
        yield cluster


class Shell:
    """Runs Slurm's commands against one cluster."""

    def __init__(self, cluster: PrivateCluster) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.env = {**kept, **cluster.env}

    def __call__(self, *argv: str, check: bool = True) -> str:
        """Run one command and return its standard output."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str, folder: Path) -> str:
        """Submit a batch script whose output goes to `folder`/out; return the job id."""
        path = folder / "job.sh"
        path.write_text(script)
        return self("sbatch", "--parsable", "-D", str(folder), "-o", str(folder / "out"), *options, str(path)).strip()


@pytest.fixture(scope="session")
def shell_for() -> Callable[[PrivateCluster], Shell]:
    """Return a way to run Slurm's commands against a cluster."""
    return Shell


def wait_for(what: str, condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until `condition` holds; fail naming `what` after `timeout` seconds, which only a hang takes."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:g} s for: {what}"
        time.sleep(0.05)
