"""Save, commit and prune for one rank, and remember what that costs."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pctool.checkpoint import torch as engine
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import clear_unfinished, parents_of, prune, rejected
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import FencedError, PctoolError
from pctool.run.layout import checkpoint_name
from pctool.run.ledger import Ledger
from pctool.run.page import Page


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

    state: engine.TrainState
    identity: engine.Identity
    group: Group
    ledger: RankLedger
    page: Page | None
    keep: int | None
    parent: str | None = None  # the checkpoint trained on from
    saved_step: int | None = None  # the step of the newest one complete, here or by an earlier attempt
    save_s: float | None = None  # seconds the last save took, None before the first

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        """Save on every rank and go on together; return whether the checkpoint is complete.

        A failure on any rank fails it for all, is in the ledger, and training goes on. Raises FencedError.
        """
        with self._timed():
            try:
                began = time.time()
                written = engine.write(self.state, step, self.identity, self.group)
                self.group.first(lambda: self._commit(written, position, began))
            except FencedError:
                raise
            except (PctoolError, OSError) as error:
                return self._failed(step, error)
        self._completed(written)
        self._prune()
        return True

    def save_and_leave(self, step: int, position: Mapping[str, Any]) -> bool:
        """Save on every rank; return once all data files are durable, on rank 0 once the checkpoint is complete.

        So the other ranks may end while rank 0 commits. False if it failed here; never raises for that.
        """
        with self._timed():
            try:
                began = time.time()
                written = engine.write(self.state, step, self.identity, self.group)
                if self.group.rank == 0:
                    self._commit(written, position, began)
            except (PctoolError, OSError) as error:
                return self._failed(step, error)
        self._completed(written)
        return True

    def _commit(self, written: engine.Written, position: Mapping[str, Any], began: float) -> None:
        manifest = engine.commit(written, self.identity, parent=self.parent, position=position)
        if self.page is not None:
            self.page.report_committed(written.step)
        self.ledger.append(
            "committed",
            attempt=self.identity.attempt,
            name=written.name,
            step=written.step,
            bytes=manifest.bytes,
            seconds=round(time.time() - began, 3),
            tier="posix",
            parent=self.parent,
            keep=self.keep,
        )
        say(f"step {written.step} saved as {written.name}")

    def _completed(self, written: engine.Written) -> None:
        self.parent, self.saved_step = written.name, written.step

    def _failed(self, step: int, error: Exception) -> bool:
        if self.group.rank == 0:
            name = checkpoint_name(self.identity.attempt, step)
            self.ledger.append("commit-failed", attempt=self.identity.attempt, name=name, step=step, error=str(error))
            say(f"step {step} could not be saved: {error}")
            self._clear(name)
        return False

    def _clear(self, name: str) -> None:
        """Remove what a failed save left, so that one for want of room does not take the room of the next.

        All ranks have ended their writing by then: each has told the others how it went.
        """
        store = PosixStore(self.identity.run.checkpoints)
        try:
            if store.manifest(name) is None:
                store.remove(name)
        except (OSError, StoreUnreadableError) as error:
            say(f"what was written of {name} could not be removed: {error}")

    def _prune(self) -> None:
        if self.keep is None or self.group.rank != 0:
            return
        run, attempt = self.identity.run, self.identity.attempt
        store = PosixStore(run.checkpoints)
        try:
            events = self.ledger.read()
            removals = prune(run, store, attempt, self.keep, damaged=rejected(events), parents=parents_of(events))
            for name in itertools.chain(removals, clear_unfinished(run, store, attempt, events)):
                self.ledger.append("pruned", attempt=attempt, name=name, tier="posix")
        except (OSError, StoreUnreadableError) as error:
            say(f"old checkpoints could not be removed: {error}")  # they are in nobody's way yet

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.time()
        if self.page is not None:
            self.page.report_saving(began)
        try:
            yield
        finally:
            self.save_s = time.time() - began
            if self.page is not None:
                self.page.report_saving(0.0)
