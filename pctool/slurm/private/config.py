"""What a private cluster is started with: one value, handed from the caller to its keeper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pctool.slurm.install import SlurmInstall
from pctool.spec.cluster import ClusterView


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Everything the supervisor needs to know. Times are unscaled seconds."""

    view: ClusterView
    folder: Path
    install: SlurmInstall
    time_scale: float = 1.0
    boot_delay: float = 0.0
    booted: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    owner: int | None = None  # the process whose end ends the cluster; None: it lives until `down`
