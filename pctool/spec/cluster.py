"""What the rest of pctool needs to know of a cluster: the ClusterView."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ComputeResourceView:
    """One compute resource as Slurm sees it. `min_count` nodes are static (`st`), the rest dynamic (`dy`)."""

    name: str
    queue: str
    instance_types: tuple[str, ...]
    min_count: int
    max_count: int
    cpus: int  # what slurm.conf says: vCPUs, or cores where DisableSimultaneousMultithreading is set
    real_memory_mib: int  # floor(95 % of the smallest type's memory), or SchedulableMemory
    gpu_type: str | None = None  # Gres type as ParallelCluster writes it: h100, a100, l40s
    gpus: int = 0
    efa: bool = False
    features: tuple[str, ...] = ()  # without the leading static|dynamic
    static_weight: int = 1
    dynamic_weight: int = 1000
    custom_settings: Mapping[str, str] = field(default_factory=dict)

    def node_names(self) -> tuple[tuple[str, bool], ...]:
        """Return (node name, is static) for every node, static ones first, by ParallelCluster's naming."""
        static = [(f"{self.queue}-st-{self.name}-{n}", True) for n in range(1, self.min_count + 1)]
        dynamic = [(f"{self.queue}-dy-{self.name}-{n}", False) for n in range(1, self.max_count - self.min_count + 1)]
        return (*static, *dynamic)


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """One queue, i.e. one Slurm partition."""

    name: str
    capacity_type: str  # ONDEMAND | SPOT | CAPACITY_BLOCK
    compute_resources: tuple[ComputeResourceView, ...]
    default: bool = False  # the first queue of the config
    exclusive: bool = False  # JobExclusiveAllocation
    custom_settings: Mapping[str, str] = field(default_factory=dict)  # appended to the partition line

    @property
    def max_nodes(self) -> int:
        """Return the number of nodes the partition can have."""
        return sum(cr.max_count for cr in self.compute_resources)


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """One cluster. `slurm_settings` are CustomSlurmSettings in the order written, keys in Slurm's spelling."""

    source: str  # the file it was read from, or "the cluster at hand"
    queues: tuple[QueueView, ...]
    slurm_settings: tuple[tuple[str, str], ...] = ()
    scaledown_idletime_min: int = 10
    memory_scheduling: bool = False
    slurm_version: tuple[int, int] | None = None
    shared_dirs: tuple[str, ...] = ()
    one_machine: bool = False  # every node is this very machine, as on a private Slurm, so any folder is shared

    def queue(self, name: str) -> QueueView | None:
        """Return the queue called `name`, or None."""
        return next((queue for queue in self.queues if queue.name == name), None)

    @property
    def default_queue(self) -> QueueView:
        """Return the queue that jobs without --partition go to."""
        return next((queue for queue in self.queues if queue.default), self.queues[0])
