"""The metrics file of one rank: JSON lines, kept in memory between checkpoints."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import Any

_LINES = 1000  # at most this many lines wait in memory, whatever the checkpoint interval is


class Metrics:
    """Append what a rank logs to RUN/logs/<attempt>/metrics-rank<R>.jsonl.

    The shared file system is asked once a checkpoint, not once a step. What a killed rank had not written yet belongs
    to steps that are done again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._told = False
        atexit.register(self.flush)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add one line: the step and the values, which must be JSON's (or have `tolist`, as tensors do)."""
        self._waiting.append(json.dumps({"step": step, **values}, default=_plain, separators=(",", ":")))
        if len(self._waiting) % _LINES == 0:
            self.flush()

    def flush(self) -> None:
        """Append the waiting lines to the file. Where it cannot be written they wait on: training goes on."""
        if not self._waiting:
            return
        try:
            _append(self.path, "\n".join(self._waiting) + "\n")
        except OSError as error:
            if not self._told:
                sys.stderr.write(f"pctool: {self.path} cannot be written, {error.strerror}: tried again later\n")
            self._told = True
        else:
            self._waiting = []
            self._told = False


def _append(path: Path, text: str) -> None:
    """Append a text whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size, data = file.tell(), memoryview(text.encode())
        try:
            while data:
                data = data[file.write(data) or 0 :]
        except OSError:
            file.truncate(size)
            raise


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be logged: give a number, a string or a list")
