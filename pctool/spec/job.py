"""The job spec: one training job in sbatch's own option names, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIRROR_WAYS = ("copy", "dra")  # how checkpoints get to the store: pctool copies them, or FSx exports them by itself


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Describe one training job. Field names are sbatch's long options with `-` written `_`.

    In TOML the keys are sbatch's spelling (`gpus-per-node`); tables `[checkpoint]` and `[environment]` hold the
    `checkpoint_*` fields (without prefix) and the environment. Times and memory stay in Slurm's notation, as written.
    """

    name: str  # --job-name
    command: tuple[str, ...]  # the training script and its arguments, as torchrun takes them
    run_dir: str  # absolute path on the shared file system; a task of an array has <run_dir>/task-<id>
    nodes: int = 1
    gpus_per_node: int = 0
    ranks_per_node: int | None = None  # torchrun's --nproc-per-node; None: gpus_per_node, or 1 without GPUs
    cpus_per_task: int | None = None
    mem: str | None = None
    partition: str | None = None
    time: str | None = None
    output: str | None = None  # None: <run dir>/logs/slurm-%j.out (%A_%a for an array)
    requeue: bool = True
    signal: str = "B:USR1@300"
    constraint: str | None = None
    account: str | None = None
    qos: str | None = None
    exclusive: bool = False
    array: str | None = None
    dependency: str | None = None
    chdir: str | None = None
    python: str | None = None  # the interpreter that has torch; None: the one pctool runs under
    template: str | None = None  # None: sbatch-templates/torchrun.sbatch.j2
    wait: int = 60  # srun --wait, seconds from the first task's exit until the rest is killed
    stop_signal: str | None = None  # passed to the rank processes of a script that cannot be changed, e.g. USR1
    max_stalled: int = 3  # attempts in a row without a new complete checkpoint before the job is held
    checkpoint_store: str | None = None  # s3://bucket/prefix that mirrors the run directory's checkpoints
    checkpoint_every: int | str | None = None  # steps, a time ("10min") or "auto"; None: what the script says
    checkpoint_keep: int | None = None  # newest complete ones kept; None: all
    checkpoint_keep_for: str | None = None  # how long each is kept ("7d"); None: no matter how old
    checkpoint_keep_every: int | None = None  # the first in each so many steps is kept for good; None: none
    checkpoint_mirror: str | None = None  # one of MIRROR_WAYS; None: copy
    checkpoint_mirror_mbps: int | None = None  # the mirror's share of the bandwidth in MB/s; None: no bound
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def nproc_per_node(self) -> int:
        """Return how many ranks torchrun starts on a node."""
        return self.ranks_per_node or self.gpus_per_node or 1
