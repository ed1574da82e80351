"""A private cluster shows what the config says: nodes, partition and settings, as scontrol has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pctool.cluster.view import load_view
from pctool.slurm.private import PrivateCluster

if TYPE_CHECKING:
    from private_harness import Shell

pytestmark = pytest.mark.slurm

TWO_QUEUES = """
Scheduling:
  Scheduler: slurm
  SlurmSettings:
    EnableMemoryBasedScheduling: true
    CustomSlurmSettings:
      - SlurmdTimeout: 300
      - AuthInfo: cred_expire=20
      - Prolog: /opt/slurm/prolog.sh
  SlurmQueues:
    - Name: cpu
      ComputeResources:
        - {Name: small, InstanceType: c5n.18xlarge, MinCount: 1, MaxCount: 2, DisableSimultaneousMultithreading: true}
    - Name: gpu
      CapacityType: SPOT
      JobExclusiveAllocation: true
      CustomSlurmSettings: {MaxTime: "1:00:00"}
      ComputeResources:
        - {Name: a, Instances: [{InstanceType: p4d.24xlarge}], MaxCount: 1, SchedulableMemory: 999}
"""


def _fields(text: str) -> dict[str, str]:
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def _config(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def test_nodes_are_as_in_the_view(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    shell = shell_for(private_cluster)
    node = _fields(shell("scontrol", "show", "node", "-o", "p5spot-dy-p5-3"))
    assert private_cluster.node_names == tuple(f"p5spot-dy-p5-{n}" for n in (1, 2, 3, 4))
    assert (node["CPUTot"], node["RealMemory"], node["Gres"]) == ("192", "1992294", "gpu:h100:8")
    assert node["AvailableFeatures"] == "dynamic,p5.48xlarge,p5,efa,gpu"
    assert node["Weight"] == "1000"
    assert "CLOUD" in node["State"]


def test_the_config_s_settings_are_in_force(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    found = _config(shell_for(private_cluster)("scontrol", "show", "config"))
    assert (found["RequeueExit"], found["RequeueExitHold"], found["JobFileAppend"]) == ("85", "86", "1")
    assert found["SlurmdTimeout"] == "9 sec"
    assert found["KillWait"] == "2 sec"
    assert "cred_expire=5" in found["AuthInfo"]  # 3.5 s, but Slurm takes nothing below 5


def test_a_task_finds_its_own_node_s_metadata_service(
    private_cluster: PrivateCluster, shell_for: Callable[[PrivateCluster], Shell]
) -> None:
    private_cluster.set_node_env("p5spot-dy-p5-2", {"STORE_ENDPOINT": "http://here and there"})
    shown = shell_for(private_cluster)(
        "srun", "-N4", "bash", "-c", 'echo "$SLURMD_NODENAME $AWS_EC2_METADATA_SERVICE_ENDPOINT ${STORE_ENDPOINT-}"'
    )
    nodes = private_cluster.status()["nodes"]
    lines = dict(line.split(" ", 1) for line in shown.splitlines())
    assert set(lines) == set(private_cluster.node_names)
    for name, text in lines.items():
        assert text.split(" ")[0] == nodes[name]["endpoint"]
    assert lines["p5spot-dy-p5-2"].endswith("http://here and there")
    assert len({node["endpoint"] for node in nodes.values()}) == 4


def test_a_config_of_two_queues(tmp_path: Path, shell_for: Callable[[PrivateCluster], Shell]) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(TWO_QUEUES)
    with PrivateCluster.start(load_view(config), time_scale=0.5) as cluster:
        shell = shell_for(cluster)
        assert cluster.node_names == ("cpu-st-small-1", "cpu-dy-small-1", "gpu-dy-a-1")
        cpu = _fields(shell("scontrol", "show", "node", "-o", "cpu-st-small-1"))
        assert (cpu["CPUTot"], cpu["AvailableFeatures"]) == ("36", "static,c5n.18xlarge,small")
        gpu = _fields(shell("scontrol", "show", "node", "-o", "gpu-dy-a-1"))
        assert (gpu["RealMemory"], gpu["Gres"]) == ("999", "gpu:a100:8")
        partition = _fields(shell("scontrol", "show", "partition", "gpu", "-o"))
        assert (partition["MaxTime"], partition["Default"]) == ("01:00:00", "NO")
        assert "EXCLUSIVE" in partition["OverSubscribe"] or partition["Exclusive"] == "NODE"  # the latter since 26.05
        settings = _config(shell("scontrol", "show", "config"))
        assert settings["SlurmdTimeout"] == "150 sec"
        assert re.search(r"cred_expire=10\b", settings["AuthInfo"])
        assert settings["SelectTypeParameters"] == "CR_CPU_MEMORY"
        assert settings["SuspendExcNodes"] == "cpu-st-small-1"
        assert list(cluster.not_mirrored) == ["Prolog"]
