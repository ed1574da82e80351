"""The lines that a launch writes to its mirror's standard input: `mirror`, `finish <deadline>`."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import BinaryIO

EOF = "eof"  # the writer has gone


class Orders:
    """The lines on standard input, read by a thread of their own.

    `on_end` is called at once when the end is told, or the writer has gone, whatever is being done meanwhile.
    """

    def __init__(self, stream: BinaryIO, on_end: Callable[[], None]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._on_end = on_end
        # a daemon, reading the descriptor itself: it may still wait for a line when the process ends
        threading.Thread(target=self._read, args=(stream.fileno(),), name="orders", daemon=True).start()

    def next(self, timeout: float | None) -> str | None:
        """Return the next line, None when `timeout` seconds are over, EOF once the writer has gone."""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def _read(self, fd: int) -> None:
        buffer = b""
        while data := os.read(fd, 4096):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._put(line.decode(errors="replace").strip())
        self._put(EOF)

    def _put(self, line: str) -> None:
        if line == EOF or line.startswith("finish"):
            self._on_end()
        self._lines.put(line)
