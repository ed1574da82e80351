"""What a launch reads from and writes to the shared file system, in a thread of its own.

A file system may hang for seconds just when a node is lost; the decisions and the channel must not hang with it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from pctool.node.config import LaunchConfig
from pctool.run.layout import write_atomic
from pctool.run.ledger import Ledger
from pctool.run.stop import StopRequest, read_stop

STOP_POLL_S = 1.0  # people wait for it; one stat of a missing file a second, on node 0 only
HEARTBEAT_S = 5.0  # what `status` and a second submission look at; far below any silence they act on

Job = Callable[[], None]


class Scribe:
    """Write log lines, and on node 0 the ledger and the heartbeat; watch for the stop file there."""

    def __init__(
        self,
        config: LaunchConfig,
        *,
        heartbeat: Callable[[], dict[str, Any]],
        on_stop: Callable[[StopRequest], None],
        complain: Callable[[str], None],
    ) -> None:
        self._attempt = config.attempt_dir
        self._number = config.attempt
        self._ledger = Ledger(config.run.ledger)
        self._run_dir = config.run.path
        self._log = config.run.logs(config.attempt) / f"launch-{config.node}.log"
        self._hub = config.node == 0
        self._heartbeat = heartbeat
        self._on_stop = on_stop
        self._complain = complain
        self._failing: set[str] = set()  # kinds of work that were refused last time
        self._stop: StopRequest | None = None
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._next_beat = 0.0
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="scribe", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def log(self, text: str) -> None:
        """Append a line to this launch's log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._jobs.put(("log", lambda: self._append(f"{stamp} {text}\n")))

    def enter(self, event: str, fields: dict[str, Any]) -> None:
        """Append an event to the ledger."""
        self._jobs.put(("ledger", lambda: self._ledger.append(event, attempt=self._number, **fields)))

    def put(self, job: Job) -> None:
        """Do something with the shared file system, after what was asked for before."""
        self._jobs.put(("other", job))

    def close(self, *, seconds: float) -> bool:
        """Write what is waiting and end; return False if the file system did not take it in `seconds`."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            job = self._next_job()
            if job is None:
                break
            self._guard(*job)
            now = time.monotonic()
            if self._hub and now >= self._next_look:
                self._next_look = now + STOP_POLL_S
                self._guard("stop file", self._look)
            if self._hub and now >= self._next_beat:
                self._next_beat = now + HEARTBEAT_S
                self._guard("heartbeat", self._beat)
        if self._hub:
            self._guard("heartbeat", self._beat)

    def _next_job(self) -> tuple[str, Job] | None:
        """Wait for a job; on node 0 at most until it is time to look again, which gives a job that does nothing."""
        if not self._hub:
            return self._jobs.get()
        try:
            return self._jobs.get(timeout=max(0.0, self._next_look - time.monotonic()))
        except queue.Empty:
            return "nothing", _nothing

    def _guard(self, kind: str, job: Job) -> None:
        """Run a job; that a kind of work is refused is told once, and anew after it has succeeded in between."""
        try:
            job()
        except OSError as error:
            if kind not in self._failing:
                self._complain(f"run directory: {error}")
            self._failing.add(kind)
            return
        self._failing.discard(kind)

    def _look(self) -> None:
        request = read_stop(self._attempt)
        if request is not None and request != self._stop:
            self._stop = request
            self._on_stop(request)

    def _beat(self) -> None:
        write_atomic(self._attempt.heartbeat, json.dumps(self._heartbeat()).encode() + b"\n")

    def _append(self, line: str) -> None:
        if self._run_dir.is_dir():  # where it is not shared, nothing is made in its place
            self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as file:
            file.write(line)


def _nothing() -> None:
    """Do nothing."""
