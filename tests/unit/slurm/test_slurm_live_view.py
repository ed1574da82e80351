"""The view of the cluster at hand, from values as scontrol gives them."""

from __future__ import annotations

from typing import Any

import pytest

from pctool.errors import SlurmError
from pctool.slurm.parse import NodeInfo, PartitionInfo
from pctool.slurm.view import LIVE, build_view


def node(name: str, **changes: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "addr": name,
        "hostname": name,
        "states": frozenset({"IDLE"}),
        "cpus": 192,
        "real_memory_mib": 1992294,
        "gres": "gpu:h100:8(S:0-1)",
        "features": ("dynamic", "p5.48xlarge", "p5", "efa", "gpu"),
        "reason": None,
        "version": None,
        "fields": {"Partitions": "p5spot,all"},
    }
    return NodeInfo(name=name, **{**values, **changes})


def partition(name: str, **changes: Any) -> PartitionInfo:
    values: dict[str, Any] = {"default": False, "up": True, "nodes": "", "total_nodes": 2, "max_nodes": None}
    return PartitionInfo(name=name, **{**values, "max_time": None, **changes})


NODES = [node("p5spot-st-p5-1"), node("p5spot-dy-p5-1"), node("p5spot-dy-p5-2")]


def test_parallelcluster_nodes_become_their_compute_resource() -> None:
    view = build_view([partition("p5spot", default=True)], NODES, (25, 11))
    (queue,) = view.queues
    (resource,) = queue.compute_resources
    assert (resource.name, resource.min_count, resource.max_count) == ("p5", 1, 3)
    assert (resource.gpus, resource.gpu_type, resource.efa) == (8, "h100", True)
    assert resource.instance_types == ("p5.48xlarge",)
    assert {name for name, _ in resource.node_names()} == {node.name for node in NODES}
    assert (view.source, view.slurm_version, view.default_queue) == (LIVE, (25, 11), queue)


def test_a_cluster_on_loopback_is_one_machine() -> None:
    here = [node("p5spot-dy-p5-1", addr="127.0.1.1"), node("p5spot-dy-p5-2", addr="127.0.1.2")]
    assert build_view([partition("p5spot")], here, None).one_machine
    assert not build_view([partition("p5spot")], [*here, *NODES], None).one_machine
    assert not build_view([partition("p5spot")], [], None).one_machine


def test_nodes_of_other_clusters_are_grouped_by_what_they_have() -> None:
    nodes = [
        node("a1", gres="gpu:2", cpus=8, fields={"Partitions": "all"}),
        node("a2", gres="gpu:2", cpus=8, fields={"Partitions": "all"}),
        node("b1", gres=None, cpus=4, fields={"Partitions": "all"}, features=()),
        node("c1", gres="gpu:a100:4,gpu:v100:1", cpus=4, fields={"Partitions": "all"}),
        node("x1", fields={"Partitions": "other"}),
    ]
    (queue,) = build_view([partition("all")], nodes, None).queues
    found = sorted((cr.max_count, cr.cpus, cr.gpus, cr.gpu_type) for cr in queue.compute_resources)
    assert found == [(1, 4, 0, None), (1, 4, 5, "a100"), (2, 8, 2, None)]
    assert queue.max_nodes == 4


def test_limits_and_exclusiveness_of_a_partition_are_kept() -> None:
    strict = partition("p5spot", max_nodes=2, fields={"OverSubscribe": "EXCLUSIVE"})
    (queue,) = build_view([strict], NODES, None).queues
    assert queue.exclusive
    assert queue.custom_settings == {"MaxNodes": "2"}


def test_a_cluster_without_partitions_is_an_error() -> None:
    with pytest.raises(SlurmError, match="no partition"):
        build_view([], NODES, None)
