"""Cluster config -> view -> the lines that ParallelCluster 3.16 itself writes for that config."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.cluster.view import load_view
from pctool.errors import NotFoundError, UsageError
from pctool.slurm.private.nodes import gres_lines, node_line, node_ranges, partition_lines, static_nodes
from pctool.spec.cluster import ClusterView, QueueView

ROOT = Path(__file__).parents[3]

CONFIG = """\
Region: us-east-1
Image: {Os: ubuntu2204}
HeadNode:
  InstanceType: m5.2xlarge
Scheduling:
  Scheduler: slurm
  SlurmSettings:
    ScaledownIdletime: 15
    EnableMemoryBasedScheduling: true
    CustomSlurmSettings:
      - MessageTimeout: 60
      - {JobFileAppend: 1, RequeueExit: "85"}
  SlurmQueues:
    - Name: p5spot
      CapacityType: SPOT
      CustomSlurmSettings: {MaxTime: 1-00:00:00}
      ComputeResources:
        - Name: p5
          Instances: [{InstanceType: p5.48xlarge}]
          MinCount: 0
          MaxCount: 16
          Efa: {Enabled: true, GdrSupport: true}
          StaticNodePriority: 10
    - Name: p5encb
      CapacityType: CAPACITY_BLOCK
      ComputeResources:
        - {Name: p5en, InstanceType: p5en.48xlarge, MinCount: 4, MaxCount: 4, Efa: {Enabled: true}}
    - Name: p6
      CapacityType: ONDEMAND
      ComputeResources:
        - {Name: b200, InstanceType: p6-b200.48xlarge, MinCount: 2, MaxCount: 4, Efa: {Enabled: true}}
    - Name: p4d
      CapacityType: SPOT
      ComputeResources:
        - Name: a100
          InstanceType: p4d.24xlarge
          MinCount: 0
          MaxCount: 8
          Efa: {Enabled: true}
          DisableSimultaneousMultithreading: true
SharedStorage:
  - {Name: home, StorageType: Efs, MountDir: /efs}
  - {Name: lustre, StorageType: FsxLustre, MountDir: fsx/}
"""

# What the ParallelCluster cookbook's own generator wrote for these queues (3.16.1's dumped config).
PARTITIONS = {
    "p5spot": """\
NodeName=p5spot-dy-p5-[1-16] CPUs=192 RealMemory=1992294 State=CLOUD \
Feature=dynamic,p5.48xlarge,p5,efa,gpu Weight=1000 Gres=gpu:h100:8
NodeSet=p5spot_nodes Nodes=p5spot-dy-p5-[1-16]
PartitionName=p5spot Nodes=p5spot_nodes MaxTime=INFINITE State=UP Default=YES MaxTime=1-00:00:00""",
    "p5encb": """\
NodeName=p5encb-st-p5en-[1-4] CPUs=192 RealMemory=1992294 State=CLOUD \
Feature=static,p5en.48xlarge,p5en,efa,gpu Weight=1 Gres=gpu:h200:8
NodeSet=p5encb_nodes Nodes=p5encb-st-p5en-[1-4]
PartitionName=p5encb Nodes=p5encb_nodes MaxTime=INFINITE State=UP""",
    "p6": """\
NodeName=p6-st-b200-[1-2] CPUs=192 RealMemory=1992294 State=CLOUD \
Feature=static,p6-b200.48xlarge,b200,efa,gpu Weight=1 Gres=gpu:b200:8
NodeName=p6-dy-b200-[1-2] CPUs=192 RealMemory=1992294 State=CLOUD \
Feature=dynamic,p6-b200.48xlarge,b200,efa,gpu Weight=1000 Gres=gpu:b200:8
NodeSet=p6_nodes Nodes=p6-st-b200-[1-2],p6-dy-b200-[1-2]
PartitionName=p6 Nodes=p6_nodes MaxTime=INFINITE State=UP""",
    "p4d": """\
NodeName=p4d-dy-a100-[1-8] CPUs=48 RealMemory=1120665 State=CLOUD \
Feature=dynamic,p4d.24xlarge,a100,efa,gpu Weight=1000 Gres=gpu:a100:8
NodeSet=p4d_nodes Nodes=p4d-dy-a100-[1-8]
PartitionName=p4d Nodes=p4d_nodes MaxTime=INFINITE State=UP""",
}
GRES = {
    "p5spot": ["NodeName=p5spot-dy-p5-[1-16] Name=gpu Type=h100 File=/dev/nvidia[0-7]"],
    "p5encb": ["NodeName=p5encb-st-p5en-[1-4] Name=gpu Type=h200 File=/dev/nvidia[0-7]"],
    "p6": [
        "NodeName=p6-st-b200-[1-2] Name=gpu Type=b200 File=/dev/nvidia[0-7]",
        "NodeName=p6-dy-b200-[1-2] Name=gpu Type=b200 File=/dev/nvidia[0-7]",
    ],
    "p4d": ["NodeName=p4d-dy-a100-[1-8] Name=gpu Type=a100 File=/dev/nvidia[0-7]"],
}


def _load(tmp_path: Path, text: str) -> ClusterView:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_view(path)


def _lines(queue: QueueView) -> str:
    nodes = [
        node_line(cr, name, static=static) for cr in queue.compute_resources for name, _, static in node_ranges(cr)
    ]
    return "\n".join([*nodes, *partition_lines(queue)])


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_the_lines_are_parallelcluster_s(tmp_path: Path, name: str) -> None:
    queue = _load(tmp_path, CONFIG).queue(name)
    assert queue is not None
    assert _lines(queue) == PARTITIONS[name]
    assert gres_lines(queue) == GRES[name]


def test_what_stands_above_the_queues(tmp_path: Path) -> None:
    view = _load(tmp_path, CONFIG)
    assert view.slurm_settings == (("MessageTimeout", "60"), ("JobFileAppend", "1"), ("RequeueExit", "85"))
    assert (view.scaledown_idletime_min, view.memory_scheduling) == (15, True)
    assert view.shared_dirs == ("/home", "/efs", "/fsx")
    assert view.default_queue.name == "p5spot"
    assert static_nodes(view)[:1] == ["p5encb-st-p5en-1"]
    assert len(static_nodes(view)) == 6


def _one_queue(resource: str, queue: str = "") -> str:
    return f"""\
Scheduling:
  Scheduler: slurm
  SlurmQueues:
    - Name: q{queue}
      ComputeResources:
        - {{Name: r, {resource}}}
"""


def test_defaults_and_the_other_rules(tmp_path: Path) -> None:
    view = _load(tmp_path, _one_queue("InstanceType: g5.xlarge", "\n      JobExclusiveAllocation: true"))
    (queue,) = view.queues
    assert (queue.capacity_type, queue.exclusive, queue.max_nodes) == ("ONDEMAND", True, 10)
    assert (view.scaledown_idletime_min, view.memory_scheduling, view.slurm_settings) == (10, False, ())
    assert gres_lines(queue) == ["NodeName=q-dy-r-[1-10] Name=gpu Type=a10g File=/dev/nvidia0"]
    assert partition_lines(queue)[1].endswith("State=UP Default=YES OverSubscribe=EXCLUSIVE")


def test_several_types_take_the_smallest_and_name_none(tmp_path: Path) -> None:
    types = "Instances: [{InstanceType: p5en.48xlarge}, {InstanceType: p5.4xlarge}]"
    (cr,) = _load(tmp_path, _one_queue(types)).queues[0].compute_resources
    assert (cr.cpus, cr.real_memory_mib, cr.gpus) == (16, 249036, 1)
    assert cr.features == ("r", "gpu")


def test_schedulable_memory_and_settings_of_a_compute_resource(tmp_path: Path) -> None:
    text = _one_queue("InstanceType: c5n.18xlarge, SchedulableMemory: 1000, CustomSlurmSettings: {MemSpecLimit: 9}")
    (cr,) = _load(tmp_path, text).queues[0].compute_resources
    assert node_line(cr, "n", static=False) == (
        "NodeName=n CPUs=72 RealMemory=1000 State=CLOUD Feature=dynamic,c5n.18xlarge,r Weight=1000 MemSpecLimit=9"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Name: p5spot", "Nam: p5spot"), "c.yaml:14: Scheduling/SlurmQueues/0/Name is missing"),
        (("Scheduler: slurm", "Scheduler: awsbatch"), "c.yaml:6: Scheduling/Scheduler: must be slurm"),
        (
            ("MaxCount: 16", "MaxCount: many"),
            "c.yaml:21: Scheduling/SlurmQueues/0/ComputeResources/0/MaxCount: must be a w",
        ),
        (
            ("MinCount: 0\n          MaxCount: 16", "MinCount: 17\n          MaxCount: 16"),
            "MinCount 17 is more than MaxCount 16",
        ),
        (
            ("p5.48xlarge}", "p5.48xlarg}"),
            "c.yaml:19: Scheduling/SlurmQueues/0/ComputeResources/0/Instances/0/InstanceType",
        ),
        (("CapacityType: SPOT", "CapacityType: Spot"), "must be one of ONDEMAND, SPOT, CAPACITY_BLOCK, is 'Spot'"),
        (("MaxTime: 1-00:00:00", "MaxTime: 24:00:00"), 'write it as "24:00:00"'),
        (("Name: p5encb", "Name: p5spot"), "'p5spot' is there twice"),
        (("Name: p5encb", "Name: P5"), "must begin with a letter and hold only lower-case"),
        (("Name: p5encb", "Name: 5"), 'must be a string, is a number\n  -> write it quoted: "5"'),
        (("Region: us-east-1", "Region: a\nRegion: b"), "c.yaml:2: Region is there twice, first on line 1"),
        (("Region: us-east-1", "Region: [a"), "not valid YAML"),
        (("Region: us-east-1", "Region: &a [*a]"), "an alias that contains itself"),
        (("{JobFileAppend: 1,", "{Job File: 1,"), "'Job File' is not the name of a Slurm setting"),
        (('RequeueExit: "85"', "RequeueExit: [85]"), "must be one value, is a list"),
        (
            ("ComputeResources:\n        - Name: p5\n", "ComputeResources: []\n      X:\n        - Name: p5\n"),
            "at least one",
        ),
        (("Efa: {Enabled: true, GdrSupport", "Efa: {Enabled: maybe, GdrSupport"), "must be true or false, is 'maybe'"),
        (("SlurmQueues:", "SlurmQueues: {}\n  Other:"), "Scheduling/SlurmQueues: must be a list, is a mapping"),
    ],
)
def test_bad_configs_are_refused_where_they_are_bad(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in CONFIG
    with pytest.raises(UsageError) as caught:
        _load(tmp_path, CONFIG.replace(*change, 1))
    assert message in str(caught.value)
    assert str(tmp_path / "c.yaml") in str(caught.value)


def test_the_file_itself(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such cluster config"):
        load_view(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="is empty"):
        _load(tmp_path, "# nothing\n")
    with pytest.raises(UsageError, match="Scheduling is missing"):
        _load(tmp_path, "Region: here\n")
    with pytest.raises(UsageError, match="must be a mapping, is a list"):
        _load(tmp_path, "- a\n")


def test_anchors_and_merges_are_read(tmp_path: Path) -> None:
    text = CONFIG.replace("Efa: {Enabled: true, GdrSupport: true}", "Efa: &efa {Enabled: true}")
    text = text.replace("          Efa: {Enabled: true}\n          Disable", "          Efa: *efa\n          Disable")
    queue = _load(tmp_path, text).queue("p4d")
    assert queue is not None
    assert queue.compute_resources[0].efa


def test_the_shipped_config_has_four_spot_nodes() -> None:
    view = load_view(ROOT / "cluster-configs" / "p5-spot.yaml")
    (queue,) = view.queues
    assert (queue.name, queue.capacity_type, queue.max_nodes, queue.exclusive) == ("p5spot", "SPOT", 4, True)
    settings = dict(view.slurm_settings)
    assert (settings["RequeueExit"], settings["RequeueExitHold"], settings["JobFileAppend"]) == ("85", "86", "1")
    assert "AuthInfo" not in settings
    assert "/fsx" in view.shared_dirs
