"""Nodes of a private cluster boot, get notices, are lost and come back; steps leave nothing behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from private_harness import StartCluster, wait_for

from pctool.errors import NotFoundError, SlurmError
from pctool.slurm.private import PrivateCluster, proc

if TYPE_CHECKING:
    from private_harness import Shell

pytestmark = pytest.mark.slurm

NODE = "p5spot-dy-p5-2"
REQUEUE = """#!/bin/bash
echo "start ${SLURM_RESTART_COUNT:-0}"
[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || exit 85
"""
LEAVES_A_CHILD = """#!/bin/bash
srun bash -c 'setsid sleep 301 & setsid env -i sleep 302 & sleep 0.2'
echo "srun $?"
setsid sleep 303 &
"""


def _sleeps(cluster: PrivateCluster, node: str | None = None) -> list[str]:
    words = [proc.arguments(pid) for pid in cluster.processes(node)]
    return [argv[1] for argv in words if argv[0].endswith("sleep")]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_exit_85_requeues_under_the_same_id(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    shell = shell_for(private_cluster)
    job = shell.submit(REQUEUE, "-N2", folder=tmp_path)
    wait_for("the second start", lambda: "start 1" in _text(tmp_path / "out"))
    assert _text(tmp_path / "out") == "start 0\nstart 1\n"  # JobFileAppend: the first start's line is still there
    assert "Restarts=1" in shell("scontrol", "show", "job", job)


def test_a_step_s_end_kills_what_it_left(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    shell = shell_for(private_cluster)
    job = shell.submit(LEAVES_A_CHILD, "-N2", folder=tmp_path)
    wait_for("the end of the job", lambda: "COMPLETED" in shell("scontrol", "show", "job", job))
    assert _text(tmp_path / "out") == "srun 0\n"
    wait_for("nothing left of it", lambda: not private_cluster.processes(job=job) and not _sleeps(private_cluster), 5)


def test_a_stepd_that_is_killed_takes_its_step_along(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    shell = shell_for(private_cluster)
    job = shell.submit("#!/bin/bash\nsleep 304\n", "-N1", "--no-requeue", folder=tmp_path)
    wait_for("the script's sleep", lambda: "304" in _sleeps(private_cluster))
    stepd = [p for p in private_cluster.processes() if proc.arguments(p)[0].startswith(f"slurmstepd: [{job}.batch]")]
    proc.send(stepd, signal.SIGKILL)
    wait_for("no sleep", lambda: "304" not in _sleeps(private_cluster), 5)
    shell("scancel", job, check=False)


def test_a_lost_node_leaves_no_process_and_comes_back(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    with start_cluster() as cluster:
        shell = shell_for(cluster)
        script = "#!/bin/bash\necho start\nsrun bash -c 'setsid sleep 401 & sleep 402'\n"
        job = shell.submit(script, "-N4", folder=tmp_path)
        wait_for("two sleeps on each node", lambda: len(_sleeps(cluster)) == 8)
        before = cluster.status()["nodes"][NODE]
        doomed = cluster.processes(NODE)
        cluster.kill(NODE)
        assert cluster.processes(NODE) == []
        assert not [pid for pid in [*doomed, before["init"]] if proc.read(pid)]
        assert len(_sleeps(cluster)) == 6  # the others go on: nobody has told them
        wait_for(
            "DOWN by clustermgtd and the job requeued", lambda: "Restarts=1" in shell("scontrol", "show", "job", job)
        )
        wait_for("the second start", lambda: _text(tmp_path / "out").count("start") == 2, 90)
        after = cluster.status()["nodes"][NODE]
        assert after["state"] == "up"
        assert after["instance_id"] != before["instance_id"]


def test_a_batch_host_that_is_lost(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    with start_cluster(nodes=2) as cluster:
        shell = shell_for(cluster)
        job = shell.submit("#!/bin/bash\nsrun sleep 403\n", "-N2", folder=tmp_path)
        wait_for("a sleep on each node", lambda: len(_sleeps(cluster)) == 2)
        cluster.kill("p5spot-dy-p5-1", down_after=10)  # half a second, scaled
        wait_for("the job requeued", lambda: "Restarts=1" in shell("scontrol", "show", "job", job))
        assert "403" not in _sleeps(cluster, "p5spot-dy-p5-1")
        assert _text(tmp_path / "out") == ""  # its srun could not say a word


def test_slurm_alone_notices_a_loss_that_nobody_tells_it(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    with start_cluster(nodes=2) as cluster:
        shell = shell_for(cluster)
        job = shell.submit("#!/bin/bash\nsrun sleep 404\n", "-N2", folder=tmp_path)
        wait_for("a sleep on each node", lambda: len(_sleeps(cluster)) == 2)
        cluster.kill(NODE, down_after=None)
        killed = time.monotonic()
        wait_for("the job requeued", lambda: "Restarts=1" in shell("scontrol", "show", "job", job))
        assert (
            time.monotonic() - killed > 6
        )  # SlurmdTimeout is 9 s, counted from the last answer: not clustermgtd's 3 s


def test_a_notice_kills_at_its_deadline_and_can_be_taken_back(start_cluster: StartCluster) -> None:
    with start_cluster(nodes=2) as cluster:
        deadline = cluster.notice(NODE, lead_s=40, replace_after=0)  # two seconds, scaled
        cluster.notice("p5spot-dy-p5-1", lead_s=20)
        cluster.clear("p5spot-dy-p5-1")
        first = cluster.status()["nodes"][NODE]
        assert abs(first["deadline"] - deadline) < 1e-3
        wait_for("a new instance", lambda: cluster.status()["nodes"][NODE]["instance_id"] != first["instance_id"], 20)
        assert time.time() >= deadline
        assert cluster.status()["nodes"][NODE]["deadline"] is None
        assert cluster.status()["nodes"]["p5spot-dy-p5-1"]["state"] == "up"
        wait_for("Slurm to use it", lambda: cluster.status()["nodes"][NODE]["slurm"] == "IDLE+CLOUD", 20)


def test_nodes_boot_when_a_job_wants_them_and_fail_without_capacity(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    with start_cluster(nodes=2, booted=False, boot_delay=20) as cluster:
        shell = shell_for(cluster)
        cluster.boot(fail=1)
        assert {node["state"] for node in cluster.status()["nodes"].values()} == {"off"}
        job = shell.submit("#!/bin/bash\necho start; sleep 0.1\n", "-N2", folder=tmp_path)
        log = cluster.folder / "log" / "slurmctld.log"  # the node shows it only until clustermgtd's next round
        wait_for("no capacity", lambda: "InsufficientInstanceCapacity" in log.read_text(errors="replace"), 30)
        assert _text(tmp_path / "out") == ""
        wait_for("the boot", lambda: any(node["state"] == "booting" for node in cluster.status()["nodes"].values()))
        assert _text(tmp_path / "out") == ""  # a second of boot delay, scaled
        wait_for("the job's end", lambda: "COMPLETED" in shell("scontrol", "show", "job", job))


def test_two_clusters_side_by_side(
    start_cluster: StartCluster, private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    with start_cluster(nodes=2) as other:
        assert other.folder != private_cluster.folder
        assert len(shell_for(other)("srun", "-N2", "hostname").splitlines()) == 2
        assert len(shell_for(private_cluster)("srun", "-N4", "hostname").splitlines()) == 4
        other.kill(NODE)
        assert private_cluster.processes(NODE)
    assert not other.folder.exists()
    assert len(shell_for(private_cluster)("srun", "-N4", "hostname").splitlines()) == 4


def test_bad_requests_are_refused(private_cluster: PrivateCluster) -> None:
    with pytest.raises(NotFoundError, match="no node 'p5spot-dy-p5-9'"):
        private_cluster.kill("p5spot-dy-p5-9")
    private_cluster.imds_fault(NODE, "500")
    private_cluster.imds_fault(NODE, None)
    private_cluster.rebalance(NODE)
    private_cluster.clear(NODE)
    assert private_cluster.status()["nodes"][NODE]["state"] == "up"


def test_a_dead_node_takes_no_notice(start_cluster: StartCluster) -> None:
    with start_cluster(nodes=1) as cluster:
        cluster.kill("p5spot-dy-p5-1", down_after=None)
        with pytest.raises(SlurmError, match="is dead, not up"):
            cluster.notice("p5spot-dy-p5-1")


def test_a_node_given_up_at_resume_timeout_can_be_tried_again(
    start_cluster: StartCluster, shell_for: Callable[[PrivateCluster], Shell], tmp_path: Path
) -> None:
    with start_cluster(nodes=1, booted=False, boot_delay=600.0, settings={"ResumeTimeout": "6"}) as cluster:
        shell = shell_for(cluster)
        job = shell.submit("#!/bin/bash\necho ran\n", "-N1", folder=tmp_path)
        wait_for("the node given up", lambda: "ResumeTimeout" in shell("sinfo", "-h", "-N", "-o", "%E"))
        cluster.boot(delay=0)
        wait_for("the job on the next instance", lambda: "COMPLETED" in shell("scontrol", "show", "job", job), 120)
        assert _text(tmp_path / "out") == "ran\n"
