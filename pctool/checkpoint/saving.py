"""The saves of one rank: what is complete, what each cost, and what launch is told of it."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pctool.checkpoint.client import Result
from pctool.checkpoint.engine import Engine, Started
from pctool.checkpoint.group import Group
from pctool.checkpoint.interval import Every
from pctool.checkpoint.measured import InFlight, SaveCost, SaveCosts
from pctool.checkpoint.schedule import Schedule
from pctool.checkpoint.staging import Copied
from pctool.checkpoint.stores import order
from pctool.checkpoint.torch import Identity, State
from pctool.errors import FencedError, IncompleteError, PctoolError
from pctool.run.layout import checkpoint_name
from pctool.run.ledger import Ledger
from pctool.run.page import Page

_BUSY = "the save before it was still under way"


def say(text: str) -> None:
    """Print one line about what the ranks decided, to the log, if that can be written."""
    with suppress(OSError):
        sys.stderr.write(f"pctool: {text}\n")
        sys.stderr.flush()


class RankLedger(Ledger):
    """The ledger as ranks write it: what cannot be written there goes to the log, and training goes on.

    A full disk fails a save; it must not end the run, nor make a complete checkpoint pass for one that failed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._later: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def append_later(self, event: str, **fields: Any) -> None:
        """Append one event in a thread, in the order of these calls: the file system may hang, training may not."""
        self._later.put((event, fields))
        if self._thread is None:
            self._thread = threading.Thread(target=self._enter, name="ledger", daemon=True)
            self._thread.start()

    def _enter(self) -> None:
        while True:
            event, fields = self._later.get()
            self.append(event, **fields)

    def append(self, event: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Append one event, durable on return. Raises KeyError for an event that is not defined."""
        try:
            super().append(event, attempt=attempt, **fields)
        except OSError as error:
            say(f"{self.path} cannot be written ({error.strerror}): {event} {fields}")


@dataclass(kw_only=True)
class Saver:
    """The saves of one attempt, seen from one rank. `page` is None on all but the first rank of a node."""

    state: State
    identity: Identity
    engine: Engine
    group: Group
    ledger: RankLedger
    page: Page | None
    every: Every | None = None
    parent: str | None = None  # the checkpoint trained on from
    saved_step: int | None = None  # the step of the newest one complete, here or by an earlier attempt
    schedule: Schedule | None = None  # on rank 0, and on all where saves are due at multiples of a number of steps
    due: int | None = None  # the step after which the next save is due, None for none
    costs: SaveCosts = field(default_factory=SaveCosts)
    copied: Copied | None = None  # on a device copies may go on for a while
    _noted: Result | None = None
    _started: Started | None = None
    _began: float = 0.0
    _told: str = ""

    def plan(self, step: int, step_s: float = 0.0) -> None:
        """Have rank 0 say when the next save is due; all ranks meet for it where that depends on times."""
        every = self.every
        if every is None:
            return
        if every.steps is not None:
            self.due = (step // every.steps + 1) * every.steps
            return
        due = self.schedule.next_due(step, step_s, self.costs) if self.schedule is not None else 0
        self.due = self.group.most([due])[0]
        if self.schedule is not None and self.schedule.why != self._told:
            self._told = self.schedule.why
            say(self._told)

    def save(self, step: int, position: Mapping[str, Any], step_s: float = 0.0) -> None:
        """Copy on every rank and go on together while it is written; a save before it is waited for, or this skipped.

        A failure on any rank fails it for all, is in the ledger, and training goes on. `step_s` is what a step takes.
        Raises FencedError.
        """
        self._save(step, position)
        self.plan(step, step_s)

    def _save(self, step: int, position: Mapping[str, Any]) -> None:
        with self._saving():
            try:
                self._take_note(self.engine.settle(0.0 if self.engine.skips else None))
                started = self._start(step, position, wait=False)
            except FencedError:
                raise
            except (PctoolError, OSError) as error:
                self._failed(step, error)
                return
        if started is None and self.group.rank == 0:
            self._skipped(step)
        self.copied = started.copied if started is not None else None
        if not self.state.updates:
            self.before_update()

    def before_update(self) -> None:
        """Have the device finish the copies before the optimizer changes what they read."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.before_update()

    def save_and_leave(self, step: int, position: Mapping[str, Any], *, within_s: float | None = None) -> bool:
        """Save on every rank and return whether the checkpoint is complete. Never raises for a save that failed."""
        end = None if within_s is None else time.monotonic() + within_s
        with self._saving():
            try:
                self._take_note(self.engine.settle(within_s))
                if self.group.most([int(self.engine.in_flight is not None)])[0]:
                    raise IncompleteError(_BUSY)
                self._start(step, position, wait=True)
                self._take_note(self.engine.settle(None if end is None else max(0.0, end - time.monotonic())))
            except (PctoolError, OSError) as error:
                self._failed(step, error)
        return self.saved_step == step

    def saved(self, step: int, *, within_s: float | None = None) -> bool:
        """Wait for the save in flight; return whether `step` is saved, the same on every rank."""
        with self._saving():
            try:
                self._take_note(self.engine.settle(within_s))
            except FencedError as error:
                say(str(error))
            return not self.group.most([int(self.saved_step != step)])[0]

    def wait(self) -> None:
        """Wait for the save in flight, and take note of how it ended."""
        try:
            self._take_note(self.engine.settle())
        except FencedError as error:
            say(str(error))

    def look(self) -> None:
        """Take note of a save that has ended meanwhile, without waiting for one."""
        with suppress(FencedError):  # the next save says so, on all ranks
            self._take_note(self.engine.settle(0.0))

    @property
    def cost_s(self) -> float | None:
        """Return what a save is likely to take from now on, the rest of one in flight included; None: unknown."""
        busy = InFlight(elapsed_s=time.monotonic() - self._began) if self.engine.in_flight else None
        return self.costs.final_s(in_flight=busy)

    def close(self) -> None:
        """Let the writer go. Every save has been waited for, or is not to be."""
        self.engine.leave()

    def _start(self, step: int, position: Mapping[str, Any], *, wait: bool) -> Started | None:
        began = time.monotonic()
        started = self.engine.save(self.state, step, parent=self.parent, position=position, wait=wait)
        if started is not None:
            self._started, self._began = started, began
        return started

    def _take_note(self, result: Result | None) -> None:
        if result is None or result is self._noted:
            return
        self._noted = result
        if result.ok:
            self.parent, self.saved_step = result.name, order(result.name)[1]
            stall_s = self._started.stall_s if self._started is not None else 0.0
            persist_s = max(0.0, result.seconds - stall_s)
            self.costs.add(SaveCost(stall_s=stall_s, persist_s=persist_s, bytes=result.bytes))
        elif self.group.rank == 0 and not result.told:
            self._failed(order(result.name)[1], IncompleteError(result.why))

    def _skipped(self, step: int) -> None:
        """Enter a save that was left out. What holds up the save before it may hold up the ledger as well."""
        self.ledger.append_later("save-skipped", attempt=self.identity.attempt, step=step, why=_BUSY)
        say(f"step {step} is not saved: {_BUSY}")

    def _failed(self, step: int, error: Exception) -> None:
        """Enter a save that came to nothing before the writers knew of it; what they know of, they enter."""
        if self.group.rank == 0:
            name = checkpoint_name(self.identity.attempt, step)
            self.ledger.append("commit-failed", attempt=self.identity.attempt, name=name, step=step, error=str(error))
            say(f"step {step} could not be saved: {error}")

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Tell launch, as long as the ranks themselves are needed for a save."""
        if self.page is not None:
            self.page.report_saving(time.time())
        try:
            yield
        finally:
            if self.page is not None:
                self.page.report_saving(0.0)
