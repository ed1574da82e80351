"""`Checkpointer`: checkpoints for any training loop. `pctool.train.Run` is built on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import rng
from pctool.checkpoint.branch import branch_point
from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import newest_attempt, own_candidates
from pctool.checkpoint.mirroring import MirrorChild
from pctool.checkpoint.plain import PlainState
from pctool.checkpoint.restore import Restorable, find_whole
from pctool.checkpoint.saving import RankLedger, Saver, say
from pctool.checkpoint.schedule import Schedule
from pctool.checkpoint.settings import Settings, Wishes, from_environment
from pctool.checkpoint.stores import open_stores
from pctool.checkpoint.torch import Identity, Loaded, State, TrainState, load
from pctool.checkpoint.uptime import follow_uptime
from pctool.errors import IncompleteError, NotFoundError, RunInUseError
from pctool.run.layout import RunDir
from pctool.run.page import Page

_HEARTBEAT_FRESH_S = 60.0  # a launch rewrites its heartbeat every 5 s
Values = State | Mapping[str, Any] | MutableMapping[str, Any]
S = TypeVar("S", bound=State)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run goes on from: `step` steps are done, `position` is what was given to the save."""

    step: int
    name: str
    tier: str
    position: Mapping[str, Any]
    world_size: int  # of the ranks that saved it
    loaded: Loaded = field(repr=False)

    def restore_random(self) -> None:
        """Put this rank's random states back (Python, NumPy, torch), where this rank existed at the save."""
        if self.loaded.random is not None:
            rng.restore(self.loaded.random)


class Checkpointer:
    """Save without stopping the training, and restore what is proven whole.

    `run_dir` holds the run over all its attempts (by default the job's, else ./run); `mirror` is `s3://bucket/prefix`.
    A save is due `every` so many steps, or "10min", or "auto" (what loses least by the measured costs); the `keep`
    newest ones stay, those younger than `keep_for` ("7d"), and one in each `keep_every` steps for good; with none of
    them, all. `busy` says what a due save does while the one before is under way: "wait", or "skip". What the job spec
    says wins over all of these. A run that has no checkpoint begins from `start_from`, another run's directory or
    checkpoint. All methods but `due` and `close` meet all ranks: call them in the same order on each.

        checkpointer = Checkpointer("run", every=500, keep=3)
        restored = checkpointer.restore({"model": model, "optimizer": optimizer})
        for step in range(restored.step + 1 if restored else 1, steps + 1):
            ...
            if checkpointer.due(step):
                checkpointer.save({"model": model, "optimizer": optimizer}, step)
        checkpointer.save_last({"model": model, "optimizer": optimizer}, steps)
        checkpointer.close()

    Raises UsageError for a wrong argument, NotFoundError and RunInUseError for the run directory's sake.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        mirror: str | None = None,
        every: int | str | None = None,
        keep: int | None = None,
        keep_for: str | None = None,
        keep_every: int | None = None,
        start_from: str | Path | None = None,
        busy: Literal["wait", "skip"] = "wait",
    ) -> None:
        mf.crc64nvme([])  # without awscrt every save would fail: say so before any step is trained
        wishes = Wishes(
            run_dir=None if run_dir is None else str(run_dir),
            every=every,
            keep=keep,
            keep_for=keep_for,
            keep_every=keep_every,
            store=mirror,
        )
        self.settings = settings = from_environment(wishes)
        self.group = Group(world_size=settings.world_size)
        self.attempt = self.group.first(lambda: _attempt(settings))
        self.ledger = RankLedger(settings.run.ledger)
        self.page = _open_page(settings)
        self._report = self.page if settings.local_rank == 0 else None
        self._mirror = self._own_mirror()
        self.saver = self._open_saver(busy)
        self._hooked: set[int] = set()
        self._start_from = None if start_from is None else str(start_from)

    def newest(self) -> mf.Manifest | None:
        """Return the manifest of the checkpoint that `restore` tries first, None for a new run; nothing is loaded.

        For a framework that must be told where it stands before there is anything to load into. Where that checkpoint
        proves damaged, `restore` returns the one before it.
        """
        settings = self.settings

        def find() -> mf.Manifest | None:
            offers = own_candidates(settings.run, open_stores(settings.run, settings.store), self.ledger.read())
            return next((offer.manifest for offer in offers if offer.manifest is not None), None)

        return self.group.first(find)

    def restore(
        self, state: Values, *, check: Callable[[mf.Manifest, Path], None] = lambda *_: None
    ) -> Restored | None:
        """Load the newest complete checkpoint of both tiers into `state`, each byte proven; None for a new run.

        `check` may refuse one by raising. Raises UsageError for one that does not fit the state, BelowDurableError
        where newer ones have vanished, ForeignCheckpointError, StoreUnreadableError: never "none" for what is merely
        unreadable.
        """
        began, settings = time.time(), self.settings
        wanted = self.saver.state = self._state(state)

        def take_in(folder: Path, manifest: mf.Manifest) -> tuple[Loaded, frozenset[str]]:
            check(manifest, folder)
            loaded = load(wanted, folder, manifest, self.group)
            return loaded, loaded.verified

        whole = find_whole(settings.run, settings.store, self.group, self.ledger, self.attempt, take_in)
        self._tell_restored(whole, began)
        if whole is None or whole.loaded is None:
            branched = self._branch(wanted, check) if self._start_from is not None else None
            self._begin_schedule(branched.step if branched is not None else 0)
            return branched
        point = whole.point
        self.saver.parent, self.saver.saved_step = point.name, point.step
        self._begin_schedule(point.step)
        return Restored(
            step=point.step,
            name=point.name,
            tier=point.tier,
            position=whole.manifest.position,
            world_size=whole.manifest.world_size,
            loaded=whole.loaded,
        )

    def due(self, step: int) -> bool:
        """Return whether to save after `step`: a comparison of two numbers."""
        return self.saver.due is not None and step >= self.saver.due

    def save(self, state: Values, step: int, *, position: Mapping[str, Any] | None = None, step_s: float = 0.0) -> None:
        """Copy the state and go on; it is complete later, and the ledger says when, or why not.

        `position` (JSON values) comes back with `restore`. `step_s` is what a step takes, for schedules by time.
        Raises FencedError once a newer attempt has taken over.
        """
        self.saver.state = self._state(state)
        self.saver.save(step, {"step": step, **(position or {})}, step_s)

    def save_last(self, state: Values, step: int, *, position: Mapping[str, Any] | None = None) -> None:
        """Save the end and return once it is complete. Raises IncompleteError if it cannot be."""
        self.saver.state = self._state(state)
        if not self.saver.saved(step) and not self.saver.save_and_leave(step, {"step": step, **(position or {})}):
            raise IncompleteError(
                f"the end of the run (step {step}) could not be saved",
                where=str(self.settings.run.checkpoints),
                fix="the ledger says why; once that is mended, start it again: it goes on from the last save",
            )

    def close(self, *, wait: bool = True) -> None:
        """Wait for the save in flight, let the writer go, and wait for the mirror, where it is our own.

        Without `wait` the writer ends what it was given by itself.
        """
        if wait:
            self.saver.wait()
        self.saver.close()
        if self._mirror is not None and not self._mirror.finish():
            say(f"not all is on {self.settings.store} yet: the next attempt goes on with it; see the ledger")

    def _branch(self, state: State, check: Callable[[mf.Manifest, Path], None]) -> Restored:
        """Take another run's checkpoint in, and go on from its step; the first save is this run's own."""
        source, run = str(self._start_from), self.settings.run
        folder, manifest = self.group.first(lambda: branch_point(source, run))
        check(manifest, folder)
        loaded = load(state, folder, manifest, self.group)
        if self.group.rank == 0:
            step = manifest.step
            self.ledger.append("branched", attempt=self.attempt, source=str(folder), step=step)
            say(f"starting from {folder} at step {step}")
        return Restored(
            step=manifest.step,
            name=folder.name,
            tier="posix",
            position=manifest.position,
            world_size=manifest.world_size,
            loaded=loaded,
        )

    def _state(self, values: Values) -> State:
        state = PlainState(values) if isinstance(values, Mapping) else values
        if torch.cuda.is_available() and isinstance(state, TrainState):
            for optimizer in state.optimizers:
                if id(optimizer) not in self._hooked:
                    self._hooked.add(id(optimizer))
                    optimizer.register_step_pre_hook(lambda *_: self.saver.before_update())
        return state

    def _tell_restored(self, whole: Restorable[Loaded] | None, began: float) -> None:
        if self.group.rank != 0:
            return
        if whole is None:
            self.ledger.append("fresh", attempt=self.attempt)
            say("no checkpoint yet" + ("" if self._start_from is not None else ": starting at step 0"))
            return
        point, seconds = whole.point, round(time.time() - began, 3)
        self.ledger.append(
            "resumed", attempt=self.attempt, name=point.name, step=point.step, tier=point.tier, seconds=seconds
        )
        say(f"resumed from {point.name} ({point.tier}) at step {point.step}")

    def _begin_schedule(self, step: int) -> None:
        """Say when the first save is due. Rank 0 knows the run's earlier attempts, and with them its losses."""
        every, settings = self.settings.every, self.settings
        if every is not None and every.steps is None and self.group.rank == 0:
            nodes = max(1, settings.world_size // settings.local_world_size)
            uptime = follow_uptime(settings.run, attempt=self.attempt, nodes=nodes)
            self.saver.schedule = Schedule(every=every, uptime=uptime)
        self.saver.plan(step)

    def _own_mirror(self) -> MirrorChild | None:
        """Return the mirror where no launch has one."""
        settings = self.settings
        if settings.store is None or settings.page is not None or self.group.rank != 0:
            return None
        return MirrorChild(settings.run, settings.store, self.attempt, say=say)

    def _open_saver(self, busy: Literal["wait", "skip"]) -> Saver:
        settings, mirror = self.settings, self._mirror
        identity = Identity(
            run=settings.run,
            attempt=self.attempt,
            topology=_topology(settings, self.group),
            code=settings.code,
            config=settings.config,
        )
        setup = Setup(
            identity=identity,
            host=settings.master[0] if settings.master else "127.0.0.1",
            writer=settings.writer,
            keep=settings.retention,
            page=settings.page if self.group.rank == 0 else None,
            busy=busy,
        )
        on_commit = mirror.committed if mirror is not None else lambda: None
        engine = Engine(setup, self.group, say=say, on_commit=on_commit)
        engine.start()  # it takes a moment, and the first save need not wait for it
        return Saver(
            state=PlainState({}),
            identity=identity,
            engine=engine,
            group=self.group,
            ledger=self.ledger,
            page=self._report,
            every=settings.every,
        )


def _attempt(settings: Settings) -> int:
    """Return the attempt that the batch script claimed; without one, take the next that no tier has seen."""
    if settings.attempt is not None:
        if not settings.run.path.is_dir():
            raise NotFoundError("the run directory is not there", where=str(settings.run.path))
        return settings.attempt
    run = settings.run
    run.attempts.mkdir(parents=True, exist_ok=True)
    _refuse_if_held(run, max(run.attempt_numbers(), default=-1))
    number = newest_attempt(run, settings.store) + 1
    while True:
        try:
            run.attempt(number).path.mkdir()
            return number
        except FileExistsError:
            number += 1


def _refuse_if_held(run: RunDir, newest: int) -> None:
    try:
        age = time.time() - run.attempt(newest).heartbeat.stat().st_mtime
    except OSError:
        return
    if age < _HEARTBEAT_FRESH_S:
        raise RunInUseError(
            f"a job is at work in this run directory (its heartbeat is {age:.0f} s old)",
            where=str(run.path),
            fix="wait for it, or give this run a directory of its own with run_dir=...",
        )


def _open_page(settings: Settings) -> Page | None:
    if settings.page is None:
        return None
    if threading.current_thread() is threading.main_thread():
        # launch hears the signal and passes the stop on; here it would only end the rank before its save
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        return Page.open(settings.page)
    except OSError as error:
        raise NotFoundError(
            f"the page of this node's launch cannot be opened: {error.strerror}",
            where=settings.page,
            fix="start the ranks through `pctool launch`, or unset PCTOOL_PAGE",
        ) from error


def _topology(settings: Settings, group: Group) -> dict[str, Any]:
    return {
        "world_size": group.world,
        "ranks_per_node": settings.local_world_size,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
    }
