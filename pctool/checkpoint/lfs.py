"""What Lustre says of its parts: whether a path is on Lustre, and the room on each of its OSTs.

A file system can have hundreds of GiB free while one object storage target (OST) is full; files that are placed there
fail with ENOSPC all the same. Only `lfs df` tells. The parsers are pure; `lfs` itself has not been run with them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pctool.errors import SlurmError
from pctool.slurm import command

MOUNTS = Path("/proc/self/mountinfo")
TIMEOUT_S = 5.0
_OST = re.compile(r"(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s+(?:\d+%|-)\s+\S.*\[OST:(\d+)\]")
_SILENT_OST = re.compile(r"(\S*OST[0-9a-f]{4}\S*?)\s*:\s*(\S.*)")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Ost:
    """One object storage target. `available` is in bytes, None where it did not answer, which `why` explains."""

    name: str
    available: int | None
    why: str = ""


def parse_df(text: str) -> list[Ost]:
    """Return the OSTs of `lfs df`'s output in 1K-blocks (without -h), in its order; other lines are left out."""
    osts = []
    for line in text.splitlines():
        full, silent = _OST.match(line), _SILENT_OST.match(line)
        if full:
            osts.append(Ost(name=full[1], available=int(full[4]) * 1024))
        elif silent:
            osts.append(Ost(name=silent[1], available=None, why=silent[2].strip()))
    return osts


def mount_of(path: Path, mountinfo: str) -> tuple[str, str] | None:
    """Return (mount point, file system type) of an absolute path by the text of /proc/self/mountinfo, None if unknown.

    Format: proc(5). Of mounts one over the other the last one counts.
    """
    best: tuple[str, str] | None = None
    for line in mountinfo.splitlines():
        head, dash, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")[0]
        if not dash or len(fields) < 5:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if path.is_relative_to(point) and (best is None or len(point) >= len(best[0])):
            best = (point, kind)
    return best


def lustre_mount(path: Path) -> str | None:
    """Return the mount point of the Lustre file system that holds `path`, None if it is not on Lustre."""
    try:
        mount = mount_of(Path(os.path.realpath(path)), MOUNTS.read_text(errors="surrogateescape"))
    except OSError:
        return None  # no /proc: whatever this is, no Lustre client
    return mount[0] if mount is not None and mount[1] == "lustre" else None


class LfsDf:
    """Ask `lfs df` about one mount point, never for longer than TIMEOUT_S.

    It runs in a thread: a process that waits for a dead Lustre server cannot be killed, and nobody shall wait for it.
    While one hangs, no second is started.
    """

    def __init__(self, mount: str, *, argv: Sequence[str] = ("lfs", "df", "--lazy")) -> None:
        self._argv = (*argv, mount)
        self._thread: threading.Thread | None = None
        self._osts: list[Ost] = []

    def ask(self) -> list[Ost]:
        """Return the OSTs; [] where lfs is not there, said nothing to the point, or does not answer."""
        if self._thread is None or not self._thread.is_alive():
            self._osts = []
            self._thread = threading.Thread(target=self._run, name="lfs-df", daemon=True)
            self._thread.start()
        self._thread.join(TIMEOUT_S)
        return [] if self._thread.is_alive() else self._osts

    def _run(self) -> None:
        try:
            # a code other than 0 is what it ends with where one OST is away; the others are listed all the same
            self._osts = parse_df(command.run(self._argv, timeout=TIMEOUT_S, check=False).stdout)
        except SlurmError:  # the class of whatever cannot be started here: lfs is not there, or hangs
            self._osts = []
