"""Whether the shared file system has room for one more checkpoint, asked before each save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pctool.checkpoint.lfs import LfsDf, Ost, lustre_mount
from pctool.checkpoint.stores import unreadable
from pctool.units import format_bytes

LFS_PERIOD_S = 600.0  # OSTs fill up slowly beside the whole, and `lfs df` asks every one of them
RESERVE = 64 << 20  # bytes: a save that took the last of them would leave the ledger and the logs none
_SHOWN = 3  # OSTs that a message names
_FIX = "remove old checkpoints, lower keep in [checkpoint], or grow the file system (on FSx: its storage capacity)"


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is free for ordinary users: bytes, and files (None where the file system does not count them)."""

    bytes: int
    files: int | None


@dataclass(frozen=True, kw_only=True)
class Room:
    """A verdict. `fits` False: the save cannot succeed. `doubtful`: it may fail, and is worth a try.

    `what`, `where` and `fix` are empty where there is nothing to say.
    """

    fits: bool
    doubtful: bool = False
    what: str = ""
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Return the verdict as messages have it."""
        return f"{self.where}: {self.what}\n  -> {self.fix}" if self.what else "there is room"


class Osts(Protocol):
    """What is needed of LfsDf."""

    def ask(self) -> list[Ost]:
        """Return the OSTs, [] where nothing is known of them."""


class RoomCheck:
    """Check the room in one folder. Rank 0 (or whoever writes for it) calls `check` before each save; keep the object.

    One statvfs a call; on Lustre also `lfs df`, once in LFS_PERIOD_S and for five seconds at most. Quotas are not seen.
    """

    def __init__(self, folder: Path, *, osts: Osts | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.clock = clock
        mount = lustre_mount(folder) if osts is None else None
        self._source: Osts | None = LfsDf(mount) if mount is not None else osts
        self._osts: list[Ost] = []
        self._asked: float | None = None

    def check(self, need_bytes: int, need_files: int = 0) -> Room:
        """Return whether a save of so many bytes and files fits. Raises StoreUnreadableError if that cannot be told."""
        return judge(need_bytes, need_files, space_in(self.folder), self._known_osts(), str(self.folder))

    def _known_osts(self) -> list[Ost]:
        now = self.clock()
        if self._source is not None and (self._asked is None or now - self._asked >= LFS_PERIOD_S):
            self._asked = now
            self._osts = self._source.ask()
        return self._osts


def check_room(folder: Path, need_bytes: int, need_files: int = 0) -> Room:
    """Return whether a save of so many bytes and files fits into `folder`, asked once. Raises StoreUnreadableError."""
    return RoomCheck(folder).check(need_bytes, need_files)


def space_in(folder: Path) -> Space:
    """Return what is free where `folder` is, or will be. Raises StoreUnreadableError if that cannot be asked."""
    there = folder.absolute()
    while True:
        try:
            found = os.statvfs(there)
        except FileNotFoundError as error:
            if there == there.parent:
                raise unreadable(folder, error) from error
            there = there.parent
        except OSError as error:
            raise unreadable(there, error) from error
        else:
            files = found.f_favail if found.f_files > 0 else None
            return Space(bytes=found.f_bavail * found.f_frsize, files=files)


def judge(need_bytes: int, need_files: int, space: Space, osts: Sequence[Ost], where: str) -> Room:
    """Return the verdict on a save of so many bytes and files.

    An OST that has less than an even share (or RESERVE), or that does not answer, makes it doubtful only: Lustre
    prefers the emptier ones for new files, and which one a file gets is known once it is made.
    """
    if space.bytes < need_bytes + RESERVE:
        have, need = format_bytes(space.bytes), format_bytes(need_bytes)
        return Room(fits=False, what=f"a checkpoint needs {need}, and {have} are free", where=where, fix=_FIX)
    if space.files is not None and space.files <= need_files:
        what = f"a checkpoint needs {need_files} files, and {space.files} more can be made (inodes)"
        return Room(fits=False, what=what, where=where, fix="remove files that nobody needs, or old checkpoints")
    share = max(need_bytes / len(osts), RESERVE) if osts else 0.0
    short = [ost for ost in osts if ost.available is None or ost.available < share]
    if not short:
        return Room(fits=True)
    what = (
        f"{_list(short)}, while the whole file system has {format_bytes(space.bytes)}: files that Lustre places there "
        "fail with ENOSPC"
    )
    fix = f"move large files off it (`lfs find {where} -O {short[0].name} -size +1G`, `lfs migrate`), or {_FIX}"
    return Room(fits=True, doubtful=True, what=what, where=where, fix=fix)


def _list(short: Sequence[Ost]) -> str:
    shown = [
        f"{ost.name} does not answer ({ost.why})"
        if ost.available is None
        else f"{ost.name} has {format_bytes(ost.available)} left"
        for ost in short[:_SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(short) - _SHOWN} more are short" if len(short) > _SHOWN else "")
