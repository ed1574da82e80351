"""Get Slurm without root: the distribution's own packages, downloaded by apt-get and unpacked into a folder."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from pctool.errors import SlurmError
from pctool.slurm import command
from pctool.slurm.install import HOW_TO_INSTALL, PACKAGES, SlurmInstall, install_in
from pctool.units import format_bytes

_DOWNLOAD_S = 900.0
_INST = re.compile(r"^Inst ([^\s:]+)\S*(?: \[\S+\])? \((\S+) ", re.MULTILINE)
_OURS = re.compile(r"slurm|munge")


def unpack_debian(cache: Path, *, say: Callable[[str], None] = lambda text: None) -> SlurmInstall:
    """Download Slurm's packages and what they need, unpack them into `cache`/root, and return the installation.

    What is there already is replaced only once the new one works. Raises SlurmError saying what to install instead
    where apt-get or dpkg is missing or the packages cannot be had.
    """
    for name in ("apt-get", "dpkg"):
        if shutil.which(name) is None:
            raise SlurmError(f"Slurm cannot be unpacked here: there is no {name}", fix=_ask_for_it())
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        root = Path(scratch) / "root"
        _download(_packages(cache, say), Path(scratch), cache, say)
        debs = sorted(Path(scratch).glob("*.deb"))
        for number, deb in enumerate(debs, 1):
            say(f"unpacking {number} of {len(debs)}: {deb.name.partition('_')[0]}")
            command.run(["dpkg", "-x", str(deb), str(root)], timeout=_DOWNLOAD_S)
        install_in(root)  # refuses what could not run, before anything is replaced
        shutil.rmtree(cache / "root", ignore_errors=True)
        root.rename(cache / "root")
    return install_in(cache / "root")


def _packages(cache: Path, say: Callable[[str], None]) -> list[str]:
    """Return `name=version` of Slurm's packages and of those they need that this machine does not have."""
    try:
        return _simulate([])
    except SlurmError:
        say("reading the package lists of this machine's release (about 10 MB)")
        (cache / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        _apt(["update", *_own_lists(cache)])
        return _simulate(_own_lists(cache))


def _simulate(options: Sequence[str]) -> list[str]:
    """Ask apt what a machine with nothing installed would get; leave out what this one has."""
    empty = ["-o", "Dir::State::status=/dev/null"]
    done = _apt(["install", "--simulate", "--no-install-recommends", *empty, *options, *PACKAGES])
    listed = command.run(["dpkg-query", "--show", "--showformat=${db:Status-Abbrev} ${Package}\\n"]).stdout
    installed = {line.split()[-1] for line in listed.splitlines() if line.startswith("ii ")}
    return [f"{name}={version}" for name, version in parse_simulation(done.stdout, installed)]


def parse_simulation(text: str, installed: Set[str]) -> list[tuple[str, str]]:
    """Return (package, version) of each `Inst` line of `apt-get install --simulate` that is not installed.

    Slurm's and munge's own packages are always returned: they must be of one version and in one root.
    """
    found = [pair for pair in _INST.findall(text) if pair[0] not in installed or _OURS.search(pair[0])]
    if not any(_OURS.search(name) for name, _ in found):
        raise SlurmError("apt-get names no Slurm packages", fix=_ask_for_it())
    return found


def _download(packages: list[str], into: Path, cache: Path, say: Callable[[str], None]) -> None:
    say(f"downloading {len(packages)} packages: {' '.join(name.partition('=')[0] for name in packages)}")
    lists = _own_lists(cache) if (cache / "lists").is_dir() else []
    _apt(["download", *lists, *packages], cwd=into)
    size = sum(deb.stat().st_size for deb in into.glob("*.deb"))
    say(f"downloaded {format_bytes(size)}")


def _own_lists(cache: Path) -> list[str]:
    """Return the options that keep apt's lists in `cache`: fetching the machine's needs root."""
    return ["-o", f"Dir::State::lists={cache}/lists", "-o", f"Dir::Cache={cache}/apt", "-o", "APT::Sandbox::User="]


def _apt(words: Sequence[str], cwd: Path | None = None) -> command.Completed:
    argv = ["apt-get", "-q", "-o", "Debug::NoLocking=true", *words]
    if cwd is not None:  # apt-get download writes into the working directory
        argv = ["env", "-C", str(cwd), *argv]
    try:
        return command.run(argv, timeout=_DOWNLOAD_S)
    except SlurmError as error:
        raise SlurmError(f"Slurm cannot be unpacked here: {error.what}", fix=_ask_for_it()) from error


def _ask_for_it() -> str:
    return f"ask an administrator of this machine for: {HOW_TO_INSTALL}"
