"""Find a Slurm installation that a private cluster can run: the machine's, or one unpacked into a folder.

`python -m pctool.slurm.install` unpacks the distribution's packages into the user's cache, without root; it needs the
standard library, apt-get and dpkg only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from pctool.errors import SlurmError
from pctool.slurm import command

OLDEST = (22, 5)
ROOT_VARIABLE = "PCTOOL_SLURM_ROOT"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
HOW_TO_INSTALL = f"apt-get install {' '.join(PACKAGES)}"
_DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
_LOADERS = {"x86_64": "lib64/ld-linux-x86-64.so.2", "aarch64": "lib/ld-linux-aarch64.so.1"}
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_MOST_LINKS = 16


@dataclass(frozen=True, kw_only=True)
class SlurmInstall:
    """One installation. Paths are real files of this machine; `root` and the rest are set for an unpacked one.

    Programs of an unpacked one are started through `loader` with `library_path`. The loader is the root's own where
    it is a whole system (debootstrap), else this machine's.
    """

    version: tuple[int, int]
    release: str
    bin_dir: str
    munged: str
    slurmctld: str
    slurmd: str
    slurmstepd: str
    root: str | None = None
    plugin_dir: str | None = None
    loader: str = ""
    library_path: str = ""


def find_install(root: str | Path | None = None) -> SlurmInstall:
    """Return the Slurm to use: `root`, else $PCTOOL_SLURM_ROOT, else the machine's, else the one in the user's cache.

    A root is a folder with Debian packages unpacked in it, or a debootstrap of any release. Raises SlurmError saying
    what to install where there is none, for a root without Slurm, and for releases older than 22.05.
    """
    asked = root or os.environ.get(ROOT_VARIABLE)
    if asked:
        return install_in(Path(asked))
    system = _on_path()
    if system is not None:
        return system
    if (cached := cache_folder() / "root").is_dir():
        return install_in(cached)
    raise SlurmError(
        "Slurm is not installed",
        fix=f"run `{HOW_TO_INSTALL}` as root, or unpack it for yourself: `{sys.executable} -m pctool.slurm.install`",
    )


def cache_folder() -> Path:
    """Return where Slurm is unpacked for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "pctool" / "slurm"


def _on_path() -> SlurmInstall | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    found = {name: shutil.which(name, path=path) or "" for name in (*_DAEMONS, "scontrol")}
    if not all(found.values()):
        return None
    version, release = parse_release(command.run([found["slurmd"], "-V"]).stdout)
    return SlurmInstall(
        version=version,
        release=release,
        bin_dir=str(Path(found["scontrol"]).parent),
        munged=found["munged"],
        slurmctld=found["slurmctld"],
        slurmd=found["slurmd"],
        slurmstepd=found["slurmstepd"],
    )


def install_in(root: Path) -> SlurmInstall:
    """Return the installation unpacked in `root`; raise SlurmError naming what it lacks."""
    root = root.absolute()
    found = {name: _program(root, name) for name in _DAEMONS}
    missing = [name for name, path in found.items() if path is None]
    plugins = next((folder for folder in _library_folders(root) if (folder / "auth_munge.so").exists()), None)
    if missing or plugins is None:
        lacks = ", ".join([*missing, *([] if plugins else ["Slurm's plugins"])])
        raise SlurmError(f"there is no usable Slurm in it: no {lacks}", where=str(root), fix="name another root")
    loader = resolve(root, _loader()) or Path("/") / _loader()
    libraries = ":".join(str(folder) for folder in _library_folders(root))
    argv = [str(loader), "--library-path", libraries, str(found["slurmd"]), "-V"]
    version, release = parse_release(command.run(argv).stdout)
    return SlurmInstall(
        version=version,
        release=release,
        bin_dir=str(root / "usr/bin"),
        root=str(root),
        plugin_dir=str(plugins),
        loader=str(loader),
        library_path=libraries,
        munged=str(found["munged"]),
        slurmctld=str(found["slurmctld"]),
        slurmd=str(found["slurmd"]),
        slurmstepd=str(found["slurmstepd"]),
    )


def _loader() -> str:
    found = _LOADERS.get(platform.machine())
    if found is None:
        raise SlurmError(f"an unpacked Slurm cannot be run on {platform.machine()}", fix=HOW_TO_INSTALL)
    return found


def _program(root: Path, name: str) -> Path | None:
    """Return a daemon of the root; Debian calls it slurmd-wlm and links slurmd to it only when it is configured."""
    names = [f"usr/sbin/{name}-wlm", f"usr/sbin/{name}", f"usr/bin/{name}"]
    return next((path for each in names if (path := resolve(root, each))), None)


def _library_folders(root: Path) -> list[Path]:
    """Return the folders with shared libraries in a root, Slurm's own first."""
    bases = [root / "usr/lib" / f"{platform.machine()}-linux-gnu", root / "lib" / f"{platform.machine()}-linux-gnu"]
    bases += [root / "usr/lib64", root / "usr/lib"]
    folders = [base / name for base in bases for name in ("slurm-wlm", "slurm")] + bases
    return [folder for folder in folders if folder.is_dir()]


def resolve(root: Path, path: str) -> Path | None:
    """Follow the links of a path as they are meant inside `root`; return the file, or None if it is not there."""
    for _ in range(_MOST_LINKS):
        parts, here = Path(path).parts, root
        for at, part in enumerate(parts):
            here = here / part
            if here.is_symlink():
                target = os.readlink(here)
                base = "" if target.startswith("/") else os.path.dirname("/".join(parts[: at + 1]))
                path = os.path.normpath(os.path.join(base, target.lstrip("/"), *parts[at + 1 :]))
                break
        else:
            return here if here.is_file() else None
    return None


def parse_release(text: str) -> tuple[tuple[int, int], str]:
    """Read what `slurmd -V` prints (`slurm-wlm 22.05.8`): ((22, 5), "22.05.8").

    Raises SlurmError for releases older than 22.05.
    """
    match = _RELEASE.search(text)
    if not match:
        raise SlurmError(f"no Slurm release in {text.strip()!r}")
    version = int(match[1]), int(match[2])
    if version < OLDEST:
        raise SlurmError(f"Slurm {match[0]} is too old for a private cluster", fix="use Slurm 22.05 or newer")
    return version, match[0]


def main() -> int:
    """Unpack Slurm into the cache unless there is one that can be used; print which it is."""
    from pctool.slurm.unpack import unpack_debian

    try:
        try:
            found = find_install()
        except SlurmError:
            found = unpack_debian(cache_folder(), say=lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
    except SlurmError as error:
        print(f"pctool: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print(f"Slurm {found.release} in {found.root or found.bin_dir}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
