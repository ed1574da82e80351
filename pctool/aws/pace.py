"""A bound on bytes a second, over all threads together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MB = 1_000_000


class Pace:
    """Let bytes pass at a rate. Safe to use from several threads; `bytes_s` None: unbounded.

    Each caller takes its turn at once and waits until the rate has made up for those before it, so that any number of
    threads, each with a part, send no more than the rate allows over a few parts.
    """

    def __init__(
        self,
        bytes_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.bytes_s = bytes_s
        self._lifted = threading.Event()
        self._clock = clock
        self._sleep = sleep or self._lifted.wait
        self._lock = threading.Lock()
        self._free_at = 0.0  # when all that was let pass is paid for

    def take(self, size: int) -> None:
        """Wait until `size` bytes may pass."""
        rate = self.bytes_s
        if rate is None:
            return
        with self._lock:
            now = self._clock()
            start = max(self._free_at, now)  # what was not used is not saved up
            self._free_at = start + size / rate
        if start > now:
            self._sleep(start - now)

    def lift(self) -> None:
        """Let everything pass from now on, what is waiting too."""
        self.bytes_s = None
        self._lifted.set()
