"""What tests on a private Slurm share besides fixtures: the shipped config, Slurm's commands, waiting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pctool.slurm.private import PrivateCluster

CONFIG = Path(__file__).parents[2] / "cluster-configs" / "p5-spot.yaml"
SCALE = 0.05  # SlurmdTimeout 9 s, clustermgtd's period 3 s, KillWait 2 s

StartCluster = Callable[..., PrivateCluster]


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


# A shell gives a job in the background a SIGINT that is ignored, and Python then leaves it so.
INTERRUPTIBLE = ("env", "--default-signal=INT")


def wait_for(what: str, condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until `condition` holds; fail naming `what` after `timeout` seconds, which only a hang takes."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout:g} s for: {what}"
        time.sleep(0.05)
