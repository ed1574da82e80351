"""A private cluster is gone without a trace, however its owner, its keeper or its supervisor ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from private_harness import CONFIG, INTERRUPTIBLE, StartCluster, wait_for

from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.slurm.private import PrivateCluster, proc

if TYPE_CHECKING:
    from private_harness import Shell

pytestmark = pytest.mark.slurm

OWNER = """
import os, subprocess, sys, time
from pctool.cluster.view import load_view
from pctool.slurm.private import PrivateCluster, proc
cluster = PrivateCluster.start(load_view(sys.argv[1]), nodes=2, time_scale=0.1)
os.environ.update(cluster.env)
script = "srun bash -c 'setsid sleep 555 & sleep 556'"
subprocess.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", script], stdout=subprocess.DEVNULL, check=True)
while sum(proc.arguments(pid)[0] == "sleep" for pid in cluster.processes()) < 4:
    time.sleep(0.05)
status = cluster.status()
print(cluster.folder, status["pid"], proc.read(status["pid"]).parent, *cluster.processes(), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("victim", ["owner", "owner-interrupted", "supervisor", "keeper", "keeper-terminated"])
def test_nothing_is_left(victim: str) -> None:
    argv = [*INTERRUPTIBLE, sys.executable, "-c", OWNER, str(CONFIG)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            folder, *pids = owner.stdout.readline().split()
            supervisor, keeper, *others = map(int, pids)
            target = {"owner": owner.pid, "keeper": keeper, "supervisor": supervisor}[victim.partition("-")[0]]
            numbers = {"owner-interrupted": signal.SIGINT, "keeper-terminated": signal.SIGTERM}
            os.kill(target, numbers.get(victim, signal.SIGKILL))
            wait_for("the folder gone", lambda: not Path(folder).exists(), 20)
            alive = [pid for pid in (supervisor, keeper, *others) if _lives(pid)]
            wait_for("no process left", lambda: not [pid for pid in alive if _lives(pid)], 5)
        finally:
            owner.kill()


def _lives(pid: int) -> bool:
    found = proc.read(pid)
    return found is not None and found.state not in "ZX"


def test_down_leaves_nothing_and_can_be_said_twice(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    cluster = start_cluster(nodes=2)
    pids = [*cluster.processes(), cluster.status()["pid"]]
    cluster.down()
    assert not cluster.folder.exists()
    assert not [pid for pid in pids if _lives(pid)]
    cluster.down()
    with pytest.raises(NotFoundError):
        cluster.status()


def test_a_cluster_without_owner_outlives_the_process_that_started_it() -> None:
    code = (
        "import sys; from pctool.cluster.view import load_view; from pctool.slurm.private import PrivateCluster\n"
        "print(PrivateCluster.start(load_view(sys.argv[1]), nodes=1, owner=None).folder)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(CONFIG)], capture_output=True, text=True, timeout=60, check=True
    )
    cluster = PrivateCluster.attach(Path(done.stdout.strip()))
    assert cluster.status()["nodes"]["p5spot-dy-p5-1"]["state"] == "up"
    cluster.down()
    assert not cluster.folder.exists()


def test_a_daemon_that_does_not_start_says_why(
    start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c") / "c"
    with pytest.raises(SlurmError, match=r"slurmctld ended with 1 and said: .*select/none-such"):
        start_cluster(folder=folder, settings={"SelectType": "select/none-such"})
    assert not folder.exists()


def test_a_folder_that_is_taken_or_too_long_is_refused(start_cluster: StartCluster, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="may have 60 bytes"):
        start_cluster(folder=tmp_path / ("x" * 60))
    with pytest.raises(UsageError, match="is there already"):
        start_cluster(folder=Path("/tmp"))
