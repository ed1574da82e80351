"""ClusterView -> the partition and gres lines that ParallelCluster writes for each queue. Pure."""

from __future__ import annotations

from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView


def node_ranges(cr: ComputeResourceView) -> list[tuple[str, int, bool]]:
    """Return (name with range, number of nodes, is static) for the static and the dynamic nodes that there are."""
    static, dynamic = cr.min_count, cr.max_count - cr.min_count
    ranges = [
        (f"{cr.queue}-st-{cr.name}-[1-{static}]", static, True),
        (f"{cr.queue}-dy-{cr.name}-[1-{dynamic}]", dynamic, False),
    ]
    return [entry for entry in ranges if entry[1]]


def node_line(cr: ComputeResourceView, nodes: str, *, static: bool) -> str:
    """Return the NodeName line of one range of nodes."""
    feature = ",".join(("static" if static else "dynamic", *cr.features))
    weight = cr.static_weight if static else cr.dynamic_weight
    words = [
        f"NodeName={nodes} CPUs={cr.cpus} RealMemory={cr.real_memory_mib} State=CLOUD Feature={feature} Weight={weight}"
    ]
    if cr.gpu_type and cr.gpus:
        words.append(f"Gres=gpu:{cr.gpu_type}:{cr.gpus}")
    words += [f"{key}={value}" for key, value in cr.custom_settings.items()]
    return " ".join(words)


def partition_lines(queue: QueueView) -> list[str]:
    """Return the NodeSet and PartitionName lines; custom settings stand last, and Slurm takes the last of a key."""
    nodes = ",".join(name for cr in queue.compute_resources for name, _, _ in node_ranges(cr))
    words = [f"PartitionName={queue.name} Nodes={queue.name}_nodes MaxTime=INFINITE State=UP"]
    words += ["Default=YES"] if queue.default else []
    words += ["OverSubscribe=EXCLUSIVE"] if queue.exclusive else []
    words += [f"{key}={value}" for key, value in queue.custom_settings.items()]
    return [f"NodeSet={queue.name}_nodes Nodes={nodes}", " ".join(words)]


def gres_lines(queue: QueueView, *, devices: str = "/dev") -> list[str]:
    """Return the gres.conf lines of one queue; `devices` is the folder of the nvidiaN files."""
    return [
        f"NodeName={name} Name=gpu Type={cr.gpu_type} File={devices}/{_device_files(cr.gpus)}"
        for cr in queue.compute_resources
        if cr.gpu_type and cr.gpus
        for name, _, _ in node_ranges(cr)
    ]


def _device_files(gpus: int) -> str:
    return "nvidia0" if gpus == 1 else f"nvidia[0-{gpus - 1}]"


def static_nodes(view: ClusterView) -> list[str]:
    """Return the names of the nodes that power saving never touches."""
    resources = [cr for queue in view.queues for cr in queue.compute_resources]
    return [name for cr in resources for name, static in cr.node_names() if static]
