"""What happens between two steps: a save if one is due, and the stop that the gang has agreed on.

`Run` and the framework callbacks have one of these; each brings the state, and the words for its position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.checkpointer import Checkpointer, Restored
from pctool.checkpoint.group import Group
from pctool.checkpoint.saving import say
from pctool.checkpoint.settings import Settings
from pctool.checkpoint.torch import State
from pctool.errors import UsageError
from pctool.run.page import Outcome
from pctool.train.loading import end_workers
from pctool.train.stop import GRACE_S, Costs, Decision, KeyValue, StopAgreement

_NEIGHBOUR_S = 1800.0  # as long as the ranks' own agreement may take; launch ends ranks at the deadline anyway
_PAGE_PERIOD_S = 0.01  # memory only
_STORE_TIMEOUT_S = 60.0  # to reach the store that torchrun holds; it is there before any rank is


class Session:
    """The steps of one attempt, seen from one rank.

    `position` says where the training stands, as JSON values; `before_save` is called before each save.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: State,
        *,
        position: Callable[[], Mapping[str, Any]],
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        self.checkpointer = checkpointer
        self.state = state
        self.step = 0  # steps done, over all attempts
        self.step_s = 0.0
        self._position, self._before_save = position, before_save
        self._agreement: StopAgreement | None = None
        self._report = checkpointer.page if checkpointer.settings.local_rank == 0 else None

    def restore(self, check: Callable[[mf.Manifest, Path], None] = lambda *_: None) -> Restored | None:
        """Restore as `Checkpointer.restore` does."""
        restored = self.checkpointer.restore(self.state, check=check)
        self.step = restored.step if restored is not None else 0
        return restored

    def begin(self, until: int) -> None:
        """Take note that the run ends after step `until`."""
        self._until = until
        page, settings, group = self.checkpointer.page, self.checkpointer.settings, self.checkpointer.group
        if page is not None:
            store = _stop_store(settings, self.checkpointer.attempt, group)
            self._agreement = StopAgreement(store=store, flags=page, rank=group.rank, world=group.world, until=until)

    def after_step(self, began: float, *, last: bool = False) -> None:
        """Count one step that began at `began` (seconds since the epoch); save if due, stop if agreed.

        Raises SystemExit(0) at the agreed step, saved if that is possible; FencedError once another attempt has taken
        over. At step `until`, or at one that turned out to be the `last`, it leaves the save to `finish`.
        """
        self.step += 1
        self._measure(began)
        if last or self.step >= self._until:
            return
        if self.checkpointer.due(self.step):
            self._before_save()
            self.checkpointer.save(self.state, self.step, position=self._position(), step_s=self.step_s)
        if self._agreement is not None and self._agreement.flags.stop_requested:
            self._stop_if_agreed(self._agreement)

    def finish(self) -> None:
        """Save the end of the run. Raises IncompleteError if it cannot be saved."""
        if self._agreement is not None:
            self._agreement.at_end()
        self._before_save()
        self.checkpointer.save_last(self.state, self.step, position=self._position())
        self._tell(Outcome.DONE)
        self.checkpointer.close()

    def _measure(self, began: float) -> None:
        now = time.time()
        if self._report is not None:
            self._report.report_step(self.step, now)
        if not self.step_s and self.checkpointer.group.rank == 0:
            self.checkpointer.ledger.append("first-step", attempt=self.checkpointer.attempt, step=self.step)
        # a moving average over about ten steps; the first step of an attempt (compiling, caching) soon fades
        self.step_s = 0.9 * self.step_s + 0.1 * (now - began) if self.step_s else max(now - began, 1e-9)

    def _stop_if_agreed(self, agreement: StopAgreement) -> None:
        decision = agreement.at_boundary(self.step, Costs(step_s=self.step_s, save_s=self._cost_of_save()))
        if decision is not None:
            self._stop(decision)

    def _cost_of_save(self) -> float | None:
        # what a due save has just saved at the target costs nothing more
        saver = self.checkpointer.saver
        saver.look()
        return 0.0 if saver.saved_step == self.step else saver.cost_s

    def _stop(self, decision: Decision) -> NoReturn:
        """End this rank at the agreed step, saved if that is possible: the exit code is 0 in any case."""
        self._before_save()
        checkpointer, first = self.checkpointer, self.checkpointer.group.rank == 0
        if first:
            checkpointer.ledger.append("stop-step", attempt=checkpointer.attempt, step=self.step)
            say(f"stopping at step {self.step}" + (f" without a save: {decision.why}" if decision.why else ""))
        saver = checkpointer.saver
        saver.state = self.state
        left_s = self._left_s(decision)
        end = None if left_s is None else time.monotonic() + left_s
        saved = saver.saved(self.step, within_s=left_s)
        if not saved and decision.save:
            position = {"step": self.step, **self._position()}
            left_s = None if end is None else max(0.0, end - time.monotonic())
            saved = saver.save_and_leave(self.step, position, within_s=left_s)
        elif not saved and first:
            checkpointer.ledger.append(
                "final-save-skipped",
                attempt=checkpointer.attempt,
                step=self.step,
                predicted_s=decision.predicted_s,
                left_s=decision.left_s,
                why=decision.why,
            )
        self._tell(Outcome.STOPPED if saved else Outcome.STOPPED_UNSAVED)
        checkpointer.close(wait=False)  # what was to be waited for was, as long as there was time
        end_workers()  # a loader would give them five seconds each, and a notice has none to spare
        raise SystemExit(0)

    def _left_s(self, decision: Decision) -> float | None:
        """Return how long a save may be waited for, None for as long as it takes."""
        if not decision.save:
            return max(0.0, decision.left_s)
        deadline = self.checkpointer.page.deadline if self.checkpointer.page is not None else 0.0
        # a deadline that has passed with the node still alive is no reason not to try
        return max(deadline - time.time(), GRACE_S) if deadline else None

    def _tell(self, outcome: Outcome) -> None:
        """Say how this node's ranks end. The other ranks of a node wait for the one that says it.

        Rank 0 may still be committing then. A neighbour that ended badly now (torch can abort in teardown) would have
        torchrun end rank 0 in the middle of it.
        """
        page = self.checkpointer.page
        if self._report is not None:
            self._report.report_outcome(outcome)
        elif page is not None:
            end = time.monotonic() + _NEIGHBOUR_S
            while page.outcome is Outcome.NONE and time.monotonic() < end:
                time.sleep(_PAGE_PERIOD_S)


def _stop_store(settings: Settings, attempt: int, group: Group) -> KeyValue | None:
    """Return a client of the store that the launcher holds, None where one rank is alone."""
    if group.world == 1:
        return None
    if settings.master is None:
        raise UsageError(
            "MASTER_ADDR and MASTER_PORT are not set, so the ranks cannot agree on a stop",
            fix="start the ranks with torchrun",
        )
    host, port = settings.master
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S), wait_for_workers=False
    )
    return dist.PrefixStore(f"pctool/stop/{attempt}", store)  # type: ignore[attr-defined]
