"""What the actions of `pctool ckpt` share: the target, and the progress line."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from pctool.units import format_bytes

if TYPE_CHECKING:
    from pctool.checkpoint.target import Target
    from pctool.run.layout import RunDir

_EVERY_S = 0.25
_EVERY_LOGGED_S = 10.0  # where a line is not written over


def target_of(text: str, args: argparse.Namespace) -> Target:
    """Return what a job id, a path or an address names, with the S3 tier of --store or of job.toml."""
    from pctool.checkpoint.target import resolve, run_of

    text = _by_job(text)
    run = run_of(text)
    store = args.store or (_store_of(run) if run is not None else None)
    return resolve(text, store=store, at=getattr(args, "at", None))


def _by_job(text: str) -> str:
    """Return the run directory of a job id, anything else as it is."""
    if not text.replace("_", "").isdigit() or os.path.isdir(text):
        return text
    from pctool.job.find import find_run, jobs_file

    return str(find_run(text, jobs=jobs_file(os.environ)).run.path)


def _store_of(run: RunDir) -> str | None:
    from pctool.job.runspec import store_of

    return store_of(run)


class Meter:
    """Tell on stderr how many bytes are done, and how fast. Silent where stderr is no terminal, unless asked for.

    On a terminal the line is written over; `end_line` goes to the next one, where not all bytes came to be done.
    """

    _open = False

    def __init__(self, what: str, total: int, *, asked: bool) -> None:
        self._what, self._total, self._done = what, total, 0
        self._on_terminal = sys.stderr.isatty()
        self._shown = self._on_terminal or asked
        self._began = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Add bytes that are done."""
        if not self._shown:
            return
        with self._lock:
            self._done += count
            now = time.monotonic()
            ended = self._done >= self._total
            if ended or now - self._last >= (_EVERY_S if self._on_terminal else _EVERY_LOGGED_S):
                self._last = now
                self._show(now, ended=ended)

    def _show(self, now: float, *, ended: bool) -> None:
        rate = self._done / max(now - self._began, 1e-6)
        line = f"{self._what}: {format_bytes(self._done)} of {format_bytes(self._total)}, {format_bytes(rate)}/s"
        if self._on_terminal:
            sys.stderr.write(f"\r{line}\x1b[K" + ("\n" if ended else ""))
            Meter._open = not ended
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    @classmethod
    def end_line(cls) -> None:
        """End the line that a meter has begun, if one has."""
        if cls._open:
            sys.stderr.write("\n")
            cls._open = False
