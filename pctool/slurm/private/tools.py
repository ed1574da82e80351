"""The programs of a Slurm installation as argv, ready to be started for one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pctool.slurm.install import SlurmInstall


@dataclass(frozen=True, kw_only=True)
class Tools:
    """How each daemon is started. `path_prefix` is what has to stand first on PATH; None: nothing."""

    munged: tuple[str, ...]
    slurmctld: tuple[str, ...]
    slurmd: tuple[str, ...]
    slurmstepd: str
    bin_dir: str  # scontrol, srun ...
    plugin_dir: str | None = None
    path_prefix: str | None = None


def prepare(install: SlurmInstall, folder: Path) -> Tools:
    """Return the programs of `install`; wrappers that it needs are written below `folder`."""
    return Tools(
        munged=(install.munged,),
        slurmctld=(install.slurmctld,),
        slurmd=(install.slurmd,),
        slurmstepd=install.slurmstepd,
        bin_dir=install.bin_dir,
    )
