"""What the cluster at hand is, as a ClusterView, from scontrol's answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from pctool.errors import SlurmError
from pctool.slurm import query
from pctool.slurm.parse import NodeInfo, PartitionInfo
from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView

LIVE = "the cluster at hand"
UNKNOWN_CAPACITY = "UNKNOWN"  # Slurm does not know what is spot
_GRES_GPU = re.compile(r"gpu(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)")
_PARALLELCLUSTER_NODE = re.compile(r"-(?P<kind>st|dy)-(?P<resource>.+)-\d+$")
_Shape = tuple[str, int, int, str]


def live_view() -> ClusterView:
    """Ask Slurm for its version, partitions and nodes. Raise SlurmError if it does not answer, or is too old."""
    version = query.slurm_version()
    return build_view(query.partitions(), query.show_nodes(), version)


def build_view(
    partitions: Sequence[PartitionInfo], nodes: Sequence[NodeInfo], version: tuple[int, int] | None
) -> ClusterView:
    """Return the view of a cluster: nodes of one shape in one partition are one compute resource."""
    if not partitions:
        raise SlurmError("the cluster has no partition", fix="see `scontrol show partition`")
    queues = [_queue(partition, [node for node in nodes if _is_in(node, partition)]) for partition in partitions]
    here = bool(nodes) and all(node.addr.startswith("127.") for node in nodes)
    return ClusterView(source=LIVE, queues=tuple(queues), slurm_version=version, one_machine=here)


def _is_in(node: NodeInfo, partition: PartitionInfo) -> bool:
    return partition.name in node.fields.get("Partitions", "").split(",")


def _queue(partition: PartitionInfo, nodes: Iterable[NodeInfo]) -> QueueView:
    groups = groupby(sorted(nodes, key=_shape), key=_shape)
    resources = [_resource(partition.name, shape, list(members)) for shape, members in groups]
    limit = partition.max_nodes
    return QueueView(
        name=partition.name,
        capacity_type=UNKNOWN_CAPACITY,
        compute_resources=tuple(resources),
        default=partition.default,
        exclusive=partition.fields.get("OverSubscribe") == "EXCLUSIVE",
        custom_settings={} if limit is None else {"MaxNodes": str(limit)},
    )


def _shape(node: NodeInfo) -> _Shape:
    """Return what makes nodes one compute resource: its name on ParallelCluster, else what Slurm schedules by."""
    match = _PARALLELCLUSTER_NODE.search(node.name)
    return (match["resource"] if match else "", node.cpus, node.real_memory_mib, node.gres or "")


def _resource(queue: str, shape: _Shape, nodes: Sequence[NodeInfo]) -> ComputeResourceView:
    name, cpus, memory, gres = shape
    gpu = _GRES_GPU.search(gres)
    features = nodes[0].features
    return ComputeResourceView(
        name=name or nodes[0].name,
        queue=queue,
        instance_types=tuple(feature for feature in features if re.fullmatch(r"[a-z]+\d[a-z0-9-]*\.\w+", feature)),
        min_count=sum(not _is_dynamic(node) for node in nodes),
        max_count=len(nodes),
        cpus=cpus,
        real_memory_mib=memory,
        gpu_type=gpu["type"] if gpu else None,
        gpus=sum(int(match["count"]) for match in _GRES_GPU.finditer(gres)),
        efa="efa" in features,
        features=tuple(feature for feature in features if feature not in {"static", "dynamic"}),
    )


def _is_dynamic(node: NodeInfo) -> bool:
    match = _PARALLELCLUSTER_NODE.search(node.name)
    return match is not None and match["kind"] == "dy"
