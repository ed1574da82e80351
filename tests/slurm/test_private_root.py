"""A Slurm that is only unpacked somewhere runs a private cluster, and leaves nothing of it in a job's environment."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from private_harness import CONFIG

from pctool.cluster.view import load_view
from pctool.errors import UsageError
from pctool.slurm.install import SlurmInstall, find_install, install_in, resolve
from pctool.slurm.private import PrivateCluster

if TYPE_CHECKING:
    from private_harness import Shell

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> SlurmInstall:
    """Copy the installed Slurm's files into a root, as `dpkg -x` would have unpacked them."""
    installed = find_install()
    if installed.root:  # another root was asked for: it is one already
        return installed
    root = tmp_path_factory.mktemp("root")
    for name in ("munged", "slurmctld", "slurmd", "slurmstepd"):
        real = resolve(Path("/"), getattr(installed, name))
        assert real is not None
        _copy(real, root)
    for name in ("scontrol", "sinfo", "srun", "sbatch", "squeue"):
        _copy(Path(installed.bin_dir) / name, root)
    libraries = next(path for path in Path("/usr/lib").glob("*/slurm*") if (path / "auth_munge.so").exists())
    shutil.copytree(libraries, root / libraries.relative_to("/"), ignore=shutil.ignore_patterns("*.a", "*.la"))
    return install_in(root)


def _copy(path: Path, root: Path) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)


def test_an_unpacked_slurm_runs_jobs(unpacked: SlurmInstall, shell_for: Callable[[PrivateCluster], Shell]) -> None:
    with PrivateCluster.start(load_view(CONFIG), nodes=2, time_scale=0.05, install=unpacked) as cluster:
        shell = shell_for(cluster)
        commands = str(cluster.folder / "commands")
        assert shell.env["PATH"].startswith(f"{commands}:")
        shown = shell("srun", "-N2", "bash", "-c", 'echo "$(command -v srun) [${LD_LIBRARY_PATH-}] $SLURMD_NODENAME"')
        assert sorted(shown.splitlines()) == [f"{commands}/srun [] {name}" for name in cluster.node_names]
        daemons = [Path(f"/proc/{pid}/exe").readlink() for pid in cluster.processes()]
        assert daemons == [cluster.folder / "daemons" / "slurmd"] * 2


def test_its_folder_has_to_be_short(unpacked: SlurmInstall, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="may have 21 bytes here"):
        PrivateCluster.start(load_view(CONFIG), install=unpacked, folder=tmp_path / "cluster")


def test_the_copies_load_the_root_s_libraries(unpacked: SlurmInstall) -> None:
    with PrivateCluster.start(load_view(CONFIG), nodes=1, install=unpacked) as cluster:
        (pid,) = cluster.processes()
        maps = Path(f"/proc/{pid}/maps").read_text()
        slurms = {line.split()[-1] for line in maps.splitlines() if "libslurmfull" in line}
        assert slurms
        assert all(path.startswith(str(unpacked.root)) for path in slurms)
        subprocess.run([str(cluster.folder / "daemons" / "slurmd"), "-V"], check=True, capture_output=True)
