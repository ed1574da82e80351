"""The programs of a Slurm installation, ready to be started for one cluster.

The machine's own are started as they are. Those of an unpacked root are started by what is written below the
cluster's folder, so that nothing of the root leaks into a job's environment: commands by wrappers that go through the
root's dynamic loader with --library-path, daemons as copies that find loader and libraries by themselves (see elf).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from pctool.slurm.install import SlurmInstall, resolve
from pctool.slurm.private.elf import relocated

LIBRARIES = "l"  # folder of links to the root's libraries; short, since its path has to fit into a program
LOADER = "ld"
# The shortest interpreter path in use, /lib/ld-linux-aarch64.so.1 (26) or /lib64/ld-linux-x86-64.so.2 (27), less /l/ld.
LONGEST_FOLDER = 26 - len(f"/{LIBRARIES}/{LOADER}")
_COMMANDS = (
    *("sacct", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab", "sdiag", "sinfo", "sprio"),
    *("squeue", "srun", "sshare", "sstat", "strigger", "munge", "unmunge"),
)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """How each program is started. `path_prefix` is what has to stand first on PATH; None: nothing."""

    munged: str
    slurmctld: str
    slurmd: str
    slurmstepd: str
    bin_dir: str  # scontrol, srun ...
    plugin_dir: str | None = None
    path_prefix: str | None = None


def prepare(install: SlurmInstall, folder: Path) -> Tools:
    """Return the programs of `install`; what an unpacked one needs is written below `folder`."""
    if install.root is None:
        return Tools(
            munged=install.munged,
            slurmctld=install.slurmctld,
            slurmd=install.slurmd,
            slurmstepd=install.slurmstepd,
            bin_dir=install.bin_dir,
        )
    commands, daemons = folder / "commands", folder / "daemons"
    for made in (commands, daemons, folder / LIBRARIES):
        made.mkdir(mode=0o755)
    _link_libraries(install, folder / LIBRARIES)
    for name in _COMMANDS:
        if real := resolve(Path(install.root), f"usr/bin/{name}"):
            _write_wrapper(commands / name, install, str(real))
    _write_wrapper(daemons / "munged", install, install.munged)
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        program = Path(getattr(install, name)).read_bytes()
        libraries = folder / LIBRARIES
        copy = relocated(program, loader=str(libraries / LOADER), libraries=str(libraries))
        (daemons / name).write_bytes(copy)
        (daemons / name).chmod(0o755)
    return Tools(
        munged=str(daemons / "munged"),
        slurmctld=str(daemons / "slurmctld"),
        slurmd=str(daemons / "slurmd"),
        slurmstepd=str(daemons / "slurmstepd"),
        bin_dir=str(commands),
        plugin_dir=install.plugin_dir,
        path_prefix=str(commands),
    )


def _link_libraries(install: SlurmInstall, into: Path) -> None:
    """Link every library of the root by its name, the first of a name winning, and the loader."""
    (into / LOADER).symlink_to(install.loader)
    for folder in install.library_path.split(":"):
        for library in Path(folder).glob("*.so*"):
            link = into / library.name
            if not link.is_symlink():
                link.symlink_to(library)


def _write_wrapper(path: Path, install: SlurmInstall, real: str) -> None:
    words = [install.loader, "--argv0", path.name, "--library-path", install.library_path, real]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
