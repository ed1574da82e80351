"""Doctor's probe where no node is free: its job must not be left to start, and to boot an instance, later."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from private_harness import INTERRUPTIBLE, Shell, wait_for

from pctool.errors import INTERRUPTED
from pctool.job.doctor import Options, node_checks
from pctool.slurm.private import PrivateCluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def full(
    private_cluster: PrivateCluster,
    shell_for: Callable[[PrivateCluster], Shell],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shell]:
    """Give the commands of a cluster whose nodes are all taken."""
    for name, value in private_cluster.env.items():
        monkeypatch.setenv(name, value)
    shell = shell_for(private_cluster)
    job_id = shell.submit("#!/bin/bash\nsleep 300\n", "--nodes=4", "--exclusive", folder=tmp_path)
    wait_for("every node to be taken", lambda: "RUNNING" in shell("squeue", "-h", "-j", job_id, "-o", "%T"))
    yield shell
    shell("scancel", job_id)


def probes(shell: Shell) -> list[str]:
    return [line for line in shell("squeue", "-h", "-o", "%T %j").splitlines() if "pctool-doctor" in line]


def test_a_node_that_is_not_there_in_time(full: Shell) -> None:
    (check,) = node_checks(Options(node_timeout_s=2.0))
    assert (check.name, check.status) == ("node", "fail")
    assert "no node answered within 2 s" in check.found
    assert "--node-timeout" in check.advice
    assert probes(full) == []


def test_ctrl_c(full: Shell) -> None:
    argv = [*INTERRUPTIBLE, sys.executable, "-m", "pctool", "doctor"]
    with subprocess.Popen(argv, env=full.env, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for("the probe to wait", lambda: [line for line in probes(full) if line.startswith("PENDING")])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == INTERRUPTED
        finally:
            process.kill()
    assert probes(full) == []
