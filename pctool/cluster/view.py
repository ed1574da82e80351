"""Cluster config -> ClusterView, by the rules with which ParallelCluster 3.16 writes Slurm's files.

Only what the view needs is read and checked; the rest of the config is ParallelCluster's own business. The rules:
CPUs are vCPUs (cores where DisableSimultaneousMultithreading is set), the smallest of a compute resource's types;
RealMemory is floor(95 % of the smallest memory) or SchedulableMemory; the features after static|dynamic are the
instance type where there is only one, the compute resource's name, efa, gpu; Gres names the first type's model.
"""

from __future__ import annotations

import re
from pathlib import Path

from pctool.cluster.document import Value, read_document
from pctool.facts.instances import Instance, instance
from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView

MEMORY_PERCENT = 95  # of EC2's memory becomes RealMemory: the cookbook's realmemory_to_ec2memory_ratio
DEFAULT_MAX_COUNT = 10  # schemas/cluster_schema.py, as are the other defaults
DEFAULT_SCALEDOWN_MIN = 10
CAPACITY_TYPES = ("ONDEMAND", "SPOT", "CAPACITY_BLOCK")
_NAME = re.compile(r"^[a-z][a-z0-9-]*$")
_SETTING = re.compile(r"^[A-Za-z][A-Za-z0-9_]*$")


def load_view(path: str | Path) -> ClusterView:
    """Read a ParallelCluster 3 config and return what the rest of pctool needs of it.

    Raises NotFoundError if the file is missing, and UsageError naming file, line and path in the document for a bad
    or missing key.
    """
    return view_of(read_document(Path(path)))


def view_of(document: Value) -> ClusterView:
    """Return the view of a config that has been read."""
    scheduling = document.require("Scheduling")
    scheduler = scheduling.require("Scheduler")
    if scheduler.text() != "slurm":
        scheduler.fail(f"must be slurm, is {scheduler.text()!r}", fix="pctool works with Slurm clusters only")
    queues = list(scheduling.require("SlurmQueues").items())
    if not queues:
        scheduling.require("SlurmQueues").fail("needs at least one queue")
    settings = scheduling.get("SlurmSettings")
    return ClusterView(
        source=document.file,
        queues=tuple(_queue(queue, default=at == 0) for at, queue in enumerate(_unique(queues))),
        slurm_settings=_cluster_settings(settings),
        scaledown_idletime_min=_integer(settings, "ScaledownIdletime", DEFAULT_SCALEDOWN_MIN, least=-1),
        memory_scheduling=_boolean(settings, "EnableMemoryBasedScheduling"),
        shared_dirs=_shared_dirs(document),
    )


def _unique(entries: list[Value]) -> list[Value]:
    seen: set[str] = set()
    for entry in entries:
        name = entry.require("Name")
        if not _NAME.match(name.text()):
            name.fail(f"{name.text()!r} must begin with a letter and hold only lower-case letters, digits and hyphens")
        if name.text() in seen:
            name.fail(f"{name.text()!r} is there twice", fix="give it another name")
        seen.add(name.text())
    return entries


def _queue(queue: Value, *, default: bool) -> QueueView:
    name = queue.require("Name").text()
    capacity = queue.get("CapacityType")
    if capacity is not None and capacity.text() not in CAPACITY_TYPES:
        capacity.fail(f"must be one of {', '.join(CAPACITY_TYPES)}, is {capacity.text()!r}")
    resources = queue.require("ComputeResources")
    if not list(resources.items()):
        resources.fail("needs at least one compute resource")
    return QueueView(
        name=name,
        capacity_type=capacity.text() if capacity else "ONDEMAND",
        compute_resources=tuple(_compute_resource(entry, name) for entry in _unique(list(resources.items()))),
        default=default,
        exclusive=_boolean(queue, "JobExclusiveAllocation"),
        custom_settings=_settings(queue.get("CustomSlurmSettings")),
    )


def _compute_resource(entry: Value, queue: str) -> ComputeResourceView:
    types = _instances(entry)
    name = entry.require("Name").text()
    efa = entry.get("Efa")
    with_efa = efa is not None and _boolean(efa, "Enabled")
    first, one_type = types[0], len(types) == 1
    features = [
        *([first.name] if one_type else []),
        name,
        *(["efa"] if with_efa else []),
        *(["gpu"] if first.gpus else []),
    ]
    low, high = _counts(entry)
    return ComputeResourceView(
        name=name,
        queue=queue,
        instance_types=tuple(kind.name for kind in types),
        min_count=low,
        max_count=high,
        cpus=_cpus(entry, types),
        real_memory_mib=_memory(entry, types),
        gpu_type=first.gpu,
        gpus=min(kind.gpus for kind in types),
        efa=with_efa,
        features=tuple(features),
        static_weight=_integer(entry, "StaticNodePriority", 1),
        dynamic_weight=_integer(entry, "DynamicNodePriority", 1000),
        custom_settings=_settings(entry.get("CustomSlurmSettings")),
    )


def _instances(entry: Value) -> list[Instance]:
    single, several = entry.get("InstanceType"), entry.get("Instances")
    if (single is None) == (several is None):
        entry.fail("needs either InstanceType or Instances")
    named = [single] if single is not None else [one.require("InstanceType") for one in several.items()]  # type: ignore[union-attr]
    if not named:
        entry.fail("Instances needs at least one InstanceType")
    return [instance(one.text(), where=f"{one.file}:{one.line}: {one.path}") for one in named]


def _counts(entry: Value) -> tuple[int, int]:
    low, high = _integer(entry, "MinCount", 0), _integer(entry, "MaxCount", DEFAULT_MAX_COUNT)
    if low > high:
        entry.fail(f"MinCount {low} is more than MaxCount {high}", fix="raise MaxCount or lower MinCount")
    if high == 0:
        entry.fail("MaxCount 0 leaves no node", fix="set MaxCount to at least 1")
    return low, high


def _cpus(entry: Value, types: list[Instance]) -> int:
    no_threads = _boolean(entry, "DisableSimultaneousMultithreading")
    return min(kind.cores if no_threads else kind.vcpus for kind in types)


def _memory(entry: Value, types: list[Instance]) -> int:
    asked = _integer(entry, "SchedulableMemory", 0)
    return asked or min(kind.memory_mib for kind in types) * MEMORY_PERCENT // 100


def _cluster_settings(settings: Value | None) -> tuple[tuple[str, str], ...]:
    custom = settings.get("CustomSlurmSettings") if settings else None
    if custom is None:
        return ()
    return tuple(pair for entry in custom.items() for pair in _settings(entry).items())


def _settings(custom: Value | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in custom.mapping().items() if custom else ():
        if not _SETTING.match(key):
            value.fail(f"{key!r} is not the name of a Slurm setting")
        found[key] = value.setting()
    return found


def _shared_dirs(document: Value) -> tuple[str, ...]:
    """Return what every node mounts: /home (the head node's, over NFS) and SharedStorage's mount points."""
    storage = document.get("SharedStorage")
    mounts = [entry.require("MountDir").text() for entry in storage.items()] if storage else []
    return tuple(dict.fromkeys(["/home", *("/" + mount.strip("/") for mount in mounts)]))


def _integer(parent: Value | None, key: str, default: int, *, least: int = 0) -> int:
    found = parent.get(key) if parent else None
    return default if found is None else found.integer(least=least)


def _boolean(parent: Value | None, key: str) -> bool:
    found = parent.get(key) if parent else None
    return False if found is None else found.boolean()
