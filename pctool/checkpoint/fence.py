"""The fence: once a newer attempt exists, an older one publishes, prunes and mirrors nothing."""

from __future__ import annotations

import time

from pctool.errors import FencedError
from pctool.run.layout import RunDir


def check_fence(run: RunDir, attempt: int) -> None:
    """Raise FencedError if an attempt newer than `attempt` has been claimed; OSError if that cannot be read."""
    newest = max(run.attempt_numbers(), default=attempt)
    if newest > attempt:
        raise FencedError(
            f"attempt {newest} has taken over this run, so attempt {attempt} may write nothing more",
            where=str(run.path),
            fix=f"end attempt {attempt}: nothing it does from now on is used",
        )


class Watch:
    """The fence for what is looked at often, as before each part of a file: the file system is asked now and then."""

    def __init__(self, run: RunDir, attempt: int, *, every_s: float = 5.0) -> None:
        self._run = run
        self._attempt = attempt
        self._every_s = every_s
        self._next = 0.0

    def look(self) -> None:
        """Raise FencedError if a newer attempt has been claimed, as known every few seconds."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            check_fence(self._run, self._attempt)
