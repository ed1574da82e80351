"""The page of memory that a launch shares with its ranks.

A step without a stop request must cost nothing, so the request is one byte of shared memory: no system call, no file,
no collective. The page is an anonymous memfd of launch; ranks open it through /proc/<pid of launch>/fd/<n>, whose path
they get in PCTOOL_PAGE. Nothing named outlives a kill. Fields are written by one side each, in single aligned stores.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

SIZE = mmap.PAGESIZE
_STOP, _GO, _OUTCOME = 0, 1, 2  # bytes
_DEADLINE, _STEP, _STEP_TIME, _COMMITTED, _FIRST, _SAVING, _WRITING = 8, 16, 24, 32, 40, 48, 56  # 8-byte fields
_REASON, _REASON_LEN = 128, 256


class Outcome(IntEnum):
    """How the ranks of a node say they ended."""

    NONE = 0
    DONE = 1  # the run is finished
    STOPPED = 2  # stopped at the agreed step, which is saved
    STOPPED_UNSAVED = 3  # stopped at the agreed step; the newest complete checkpoint stands


class Page:
    """One node's shared page. Launch creates it, ranks open it."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        self._map = mmap.mmap(fd, SIZE)

    @classmethod
    def create(cls) -> Page:
        """Make the page (launch). Its path is valid as long as this process lives."""
        fd = os.memfd_create("pctool-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        page = cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        for offset in (_STEP, _COMMITTED, _FIRST):
            page._put_int(offset, -1)
        return page

    @classmethod
    def open(cls, path: str | Path) -> Page:
        """Open a launch's page (ranks, and whoever watches a run). Raise OSError if that launch is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(fd, str(path))

    def close(self) -> None:
        """Unmap and close."""
        self._map.close()
        os.close(self.fd)

    # launch -> ranks
    def request_stop(self, *, reason: str, deadline: float) -> None:
        """Ask the ranks to stop; `deadline` is seconds since the epoch, 0 for none. The byte goes last."""
        text = reason.encode()[: _REASON_LEN - 1]
        self._map[_REASON : _REASON + len(text) + 1] = text + b"\0"
        self._put_float(_DEADLINE, deadline)
        self._map[_STOP] = 1

    def allow_publish(self) -> None:
        """Tell the leading rank that every node's flag is set, so that it may publish the step to stop at."""
        self._map[_GO] = 1

    @property
    def stop_requested(self) -> bool:
        """Return whether a stop is requested. This is the whole cost of a step: one byte read."""
        return self._map[_STOP] != 0

    @property
    def may_publish(self) -> bool:
        """Return whether every node's flag is set."""
        return self._map[_GO] != 0

    @property
    def deadline(self) -> float:
        """Return the deadline of the stop in seconds since the epoch, 0 for none."""
        return self._get_float(_DEADLINE)

    @property
    def reason(self) -> str:
        """Return why the stop was requested."""
        return bytes(self._map[_REASON : _REASON + _REASON_LEN]).split(b"\0", 1)[0].decode(errors="replace")

    # ranks -> launch (local rank 0 writes)
    def report_step(self, step: int, when: float) -> None:
        """Publish the last finished step and its time (seconds since the epoch)."""
        self._put_int(_STEP, step)
        self._put_float(_STEP_TIME, when)
        if self._get_int(_FIRST) < 0:
            self._put_int(_FIRST, step)

    def report_saving(self, when: float) -> None:
        """Publish that a save began at `when`, or ended (0)."""
        self._put_float(_SAVING, when)

    def report_writing(self, when: float) -> None:
        """Publish that the writers are at work on a save that began at `when`, or on none (0). Rank 0's writer does."""
        self._put_float(_WRITING, when)

    def report_committed(self, step: int) -> None:
        """Publish the step of the newest complete checkpoint of this attempt."""
        self._put_int(_COMMITTED, step)

    def report_outcome(self, outcome: Outcome) -> None:
        """Publish how this node's ranks end."""
        self._map[_OUTCOME] = int(outcome)

    @property
    def step(self) -> int:
        """Return the last finished step, -1 before the first."""
        return self._get_int(_STEP)

    @property
    def step_time(self) -> float:
        """Return when the last step finished."""
        return self._get_float(_STEP_TIME)

    @property
    def first_step(self) -> int:
        """Return the first step finished in this attempt, -1 before it."""
        return self._get_int(_FIRST)

    @property
    def saving_since(self) -> float:
        """Return when the save in progress began, 0 if none is."""
        return self._get_float(_SAVING)

    @property
    def writing_since(self) -> float:
        """Return when the save began that the writers are at work on, 0 if they are on none (node 0)."""
        return self._get_float(_WRITING)

    @property
    def committed(self) -> int:
        """Return the step of this attempt's newest complete checkpoint, -1 if none."""
        return self._get_int(_COMMITTED)

    @property
    def outcome(self) -> Outcome:
        """Return how the ranks say they ended."""
        return Outcome(self._map[_OUTCOME])

    def _put_int(self, offset: int, value: int) -> None:
        struct.pack_into("=q", self._map, offset, value)

    def _get_int(self, offset: int) -> int:
        return int(struct.unpack_from("=q", self._map, offset)[0])

    def _put_float(self, offset: int, value: float) -> None:
        struct.pack_into("=d", self._map, offset, value)

    def _get_float(self, offset: int) -> float:
        return float(struct.unpack_from("=d", self._map, offset)[0])
