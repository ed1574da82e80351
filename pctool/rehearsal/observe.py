"""Watch a running job from outside, as an operator could: its ledger, its pages, its state in the queue.

The page of the leading launch tells the step as it happens; nothing in the job knows that it is watched.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pctool.errors import PctoolError
from pctool.run.layout import AttemptDir, RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.page import Page

PAGE_PERIOD_S = 0.002  # a step of the example takes tens of milliseconds
LEDGER_PERIOD_S = 0.05


class RehearsalError(PctoolError):
    """The rehearsal could not bring a scenario about (the job ended early, or an event never came)."""


@dataclass
class Observed:
    """What the watcher saw of one attempt."""

    first_step: int = -1
    last_step: int = -1
    last_time: float = 0.0


@dataclass
class Watcher:
    """Follow the pages of a run's attempts in a thread; remember the last step each attempt was seen to finish."""

    run: RunDir
    attempts: dict[int, Observed] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _failed: Exception | None = None

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._follow, name="rehearsal-watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def check(self) -> None:
        """Raise RehearsalError if the watching itself failed: what it did not see must not pass for nothing lost."""
        if self._failed is not None:
            raise RehearsalError(f"the steps could not be watched: {self._failed!r}", where=str(self.run.path))

    def wait_page(self, attempt: int, ready: Callable[[Page], bool], alive: Callable[[], str | None]) -> None:
        """Wait until `ready` holds for the attempt's leading page.

        `alive` is asked once a second and returns why waiting is pointless, or None. Raises RehearsalError.
        """
        next_check = time.monotonic() + 1.0
        page: Page | None = None
        try:
            while True:
                page = page or self._open(attempt)
                if page and ready(page):
                    return
                if time.monotonic() >= next_check:
                    gone = alive()
                    if gone:
                        raise RehearsalError(gone)
                    next_check = time.monotonic() + 1.0
                self._stop.wait(PAGE_PERIOD_S if page else LEDGER_PERIOD_S)
        finally:
            if page:
                page.close()

    def _follow(self) -> None:
        try:
            self._follow_attempts()
        except Exception as error:  # noqa: BLE001 - told by check(), from the thread that judges
            self._failed = error

    def _follow_attempts(self) -> None:
        while not self._stop.is_set():
            numbers = self.run.attempt_numbers()
            page = self._open(numbers[-1]) if numbers else None
            if page is None:
                self._stop.wait(LEDGER_PERIOD_S)
                continue
            try:
                self._follow_page(numbers[-1], page)
            finally:
                page.close()

    def _follow_page(self, attempt: int, page: Page) -> None:
        """Read one page until its launch is gone; the mapping stays readable after that."""
        seen = self.attempts.setdefault(attempt, Observed())
        while not self._stop.is_set():
            alive = os.path.exists(page.path)  # not Path.exists: a process that is ending refuses the look to its owner
            if page.step > seen.last_step:
                seen.last_step, seen.last_time = page.step, page.step_time
                seen.first_step = page.first_step
            if not alive:
                return
            self._stop.wait(PAGE_PERIOD_S)

    def _open(self, attempt: int) -> Page | None:
        record = leader_record(self.run.attempt(attempt))
        if not record or not record.get("page"):
            return None
        try:
            return Page.open(record["page"])
        except OSError:
            return None  # that launch has ended


def leader_record(attempt: AttemptDir) -> dict[str, Any] | None:
    """Return the start record of node rank 0's launch, or None as long as there is none."""
    return next((record for record in start_records(attempt) if record.get("rank") == 0), None)


def start_records(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Return the records the launches wrote when they started."""
    if not attempt.nodes.is_dir():
        return []
    return [json.loads(path.read_text()) for path in sorted(attempt.nodes.glob("*.json"))]


def wait_event(ledger: Ledger, match: Callable[[Event], bool], alive: Callable[[], str | None], *, what: str) -> Event:
    """Wait until the ledger holds an event that matches; raise RehearsalError when `alive` says it cannot come."""
    next_check = time.monotonic() + 1.0
    while True:
        found = next((event for event in ledger.read() if match(event)), None)
        if found:
            return found
        if time.monotonic() >= next_check:
            gone = alive()
            if gone:
                raise RehearsalError(f"waiting for {what}: {gone}")
            next_check = time.monotonic() + 1.0
        time.sleep(LEDGER_PERIOD_S)


def read_metrics(run: RunDir) -> dict[int, dict[int, list[dict[str, Any]]]]:
    """Return rank -> attempt -> the lines logged by Run.log; a torn last line (a killed rank) is left out."""
    ranks: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for attempt in run.attempt_numbers():
        for path in sorted(run.logs(attempt).glob("metrics-rank*.jsonl")):
            rank = int(path.stem.removeprefix("metrics-rank"))
            ranks.setdefault(rank, {})[attempt] = _whole_lines(path)
    return ranks


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    *lines, _torn = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]
