"""Copy rank 0's log to the launch's own output, so that it reaches the job's output file.

The log is read back instead of being fed through a pipe: a slow reader of the job's output can then never hold up the
ranks, and the log is whole whatever becomes of the launch.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_POLL_S = 0.5  # people read it; one read of an open file that this node itself writes, so from its own cache
_CHUNK = 1 << 16


class Follower:
    """Follow one file from its present end on, until `finish`."""

    def __init__(self, path: Path, *, out: int = 1) -> None:
        self._path = path
        self._out = out
        self._at = path.stat().st_size if path.exists() else 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy the rest, for at most `seconds`."""
        self._ended.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        fd: int | None = None
        try:
            while True:
                last = self._ended.wait(_POLL_S)  # before the read: what was written before `finish` is copied
                if fd is None and self._path.exists():
                    fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                    os.lseek(fd, self._at, os.SEEK_SET)
                while fd is not None and (data := os.read(fd, _CHUNK)):
                    _write_all(self._out, data)
                if last:
                    return
        except OSError:
            return  # the reader of our output has gone, or the file system: the log itself is whole
        finally:
            if fd is not None:
                os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
