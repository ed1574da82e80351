"""The saves of one rank: what is complete, what each cost, and what launch is told of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pctool.checkpoint.client import Result
from pctool.checkpoint.engine import Engine
from pctool.checkpoint.group import Group
from pctool.checkpoint.staging import Copied
from pctool.checkpoint.stores import order
from pctool.checkpoint.torch import Identity, TrainState
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

    def append(self, event: str, *, attempt: int | None = None, **fields: Any) -> None:
        """Append one event, durable on return. Raises KeyError for an event that is not defined."""
        try:
            super().append(event, attempt=attempt, **fields)
        except OSError as error:
            say(f"{self.path} cannot be written ({error.strerror}): {event} {fields}")


@dataclass(kw_only=True)
class Saver:
    """The saves of one attempt, seen from one rank. `page` is None on all but the first rank of a node."""

    state: TrainState
    identity: Identity
    engine: Engine
    group: Group
    ledger: RankLedger
    page: Page | None
    parent: str | None = None  # the checkpoint trained on from
    saved_step: int | None = None  # the step of the newest one complete, here or by an earlier attempt
    save_s: float | None = None  # seconds the last save took until it was complete, None before the first
    copied: Copied | None = None  # on a device copies may go on for a while
    _noted: str | None = None

    def save(self, step: int, position: Mapping[str, Any]) -> None:
        """Copy on every rank and go on together while it is written; a save before it is waited for.

        A failure on any rank fails it for all, is in the ledger, and training goes on. Raises FencedError.
        """
        with self._saving():
            try:
                self._take_note(self.engine.settle())
                started = self.engine.save(self.state, step, parent=self.parent, position=position)
            except FencedError:
                raise
            except (PctoolError, OSError) as error:
                self._failed(step, error)
                return
        if started is None and self.group.rank == 0:
            self.ledger.append("save-skipped", attempt=self.identity.attempt, step=step, why=_BUSY)
        self.copied = started.copied if started is not None else None
        if not self.state.optimizers:
            self.before_update()

    def before_update(self) -> None:
        """Have the device finish the copies before the optimizer changes what they read."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.before_update()

    def save_and_leave(self, step: int, position: Mapping[str, Any]) -> bool:
        """Save on every rank and return whether the checkpoint is complete. Never raises for a save that failed."""
        with self._saving():
            try:
                self._take_note(self.engine.settle())
                self.engine.save(self.state, step, parent=self.parent, position=position, wait=True)
                self._take_note(self.engine.settle())
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

    @property
    def cost_s(self) -> float | None:
        """Return what a save is likely to take from now on, the rest of one in flight included; None: unknown."""
        if self.save_s is None:
            return None
        return self.save_s * (2 if self.engine.in_flight else 1)

    def close(self) -> None:
        """Let the writer go. Every save has been waited for, or is not to be."""
        self.engine.leave()

    def _take_note(self, result: Result | None) -> None:
        if result is None or result.name == self._noted:
            return
        self._noted = result.name
        if result.ok:
            self.parent, self.saved_step = result.name, order(result.name)[1]
            self.save_s = result.seconds
        elif self.group.rank == 0 and not result.told:
            self._failed(order(result.name)[1], IncompleteError(result.why))

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
