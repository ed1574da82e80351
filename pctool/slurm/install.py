"""Find a Slurm installation that a private cluster can run."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from pctool.errors import SlurmError
from pctool.slurm import command

OLDEST = (22, 5)
SYSTEM_PATH = "/usr/bin:/usr/sbin:/usr/local/bin:/usr/local/sbin"
HOW_TO_INSTALL = "install it: apt-get install slurmctld slurmd slurm-client munge (Debian, Ubuntu)"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class SlurmInstall:
    """One installation: where its programs are, and its release. `root` is set for an unpacked or foreign one."""

    version: tuple[int, int]
    release: str
    bin_dir: str
    munged: str
    slurmctld: str
    slurmd: str
    slurmstepd: str
    root: str | None = None


def find_install() -> SlurmInstall:
    """Return the installation of this machine; raise SlurmError saying what to install where there is none."""
    names = ("munged", "slurmctld", "slurmd", "slurmstepd", "scontrol")
    found = {name: shutil.which(name, path=SYSTEM_PATH) or "" for name in names}
    missing = [name for name, path in found.items() if not path]
    if missing:
        raise SlurmError(f"Slurm is not installed: there is no {', '.join(missing)}", fix=HOW_TO_INSTALL)
    release = parse_release(command.run([found["slurmd"], "-V"]).stdout)
    return SlurmInstall(
        version=release[:2],
        release="{}.{:02}.{}".format(*release),
        bin_dir=found["scontrol"].rpartition("/")[0],
        munged=found["munged"],
        slurmctld=found["slurmctld"],
        slurmd=found["slurmd"],
        slurmstepd=found["slurmstepd"],
    )


def parse_release(text: str) -> tuple[int, int, int]:
    """Read what `slurmd -V` prints (`slurm-wlm 22.05.8`); raise SlurmError for releases older than 22.05."""
    match = _RELEASE.search(text)
    if not match:
        raise SlurmError(f"no Slurm release in {text.strip()!r}")
    release = int(match[1]), int(match[2]), int(match[3])
    if release[:2] < OLDEST:
        raise SlurmError(f"Slurm {match[0]} is too old", fix="use Slurm 22.05 or newer")
    return release
