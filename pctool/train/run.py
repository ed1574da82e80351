"""`Run`: restore, iterate, save when due and at the agreed stop, all in one loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import rng
from pctool.checkpoint import torch as engine
from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import newest_attempt
from pctool.checkpoint.restore import Restorable, find_whole
from pctool.errors import IncompleteError, NotFoundError, RunInUseError, UsageError
from pctool.run.layout import RunDir
from pctool.run.page import Outcome, Page
from pctool.train.loading import Place, batch_size_of, end_workers, endless, protect_workers, stream
from pctool.train.metrics import Metrics
from pctool.train.sampler import ResumableSampler
from pctool.train.saving import RankLedger, Saver, say
from pctool.train.settings import Settings, from_environment
from pctool.train.stop import Costs, Decision, KeyValue, StopAgreement

_HEARTBEAT_FRESH_S = 60.0  # a launch rewrites its heartbeat every 5 s
_NEIGHBOUR_S = 1800.0  # as long as the ranks' own agreement may take; launch ends ranks at the deadline anyway
_PAGE_PERIOD_S = 0.01  # memory only
_STORE_TIMEOUT_S = 60.0  # to reach the store that torchrun holds; it is there before any rank is


class Run:
    """One training run, over all its attempts.

    Making it restores the newest complete checkpoint, or starts at step 0 where there is none. `model` may be wrapped
    in DDP or sharded by FSDP2; `optimizer` may be one or several; `extra` holds further objects with `state_dict` and
    `load_state_dict` by name, whose state is each rank's own (a module's is one over all ranks). A checkpoint is saved
    every `every` steps, at the stop, and at the end; the `keep` newest are kept. PCTOOL_EVERY and PCTOOL_KEEP, which
    come from the job spec, override both. Checkpoints lie in the run directory of the job; without pctool's batch
    script in `run_dir`, by default ./run.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        sampler: ResumableSampler | None = None,
        every: int | None = None,
        keep: int | None = None,
        run_dir: str | None = None,
        store: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        mf.crc64nvme([])  # without awscrt every save would fail: say so before any step is trained
        settings = from_environment(run_dir=run_dir, every=every, keep=keep, store=store)
        self.settings = settings
        self.step = 0  # steps done, over all attempts
        self.sampler = sampler
        self.group = Group(world_size=settings.world_size)
        self.attempt = self.group.first(lambda: _attempt(settings))
        self.ledger = RankLedger(settings.run.ledger)
        self.metrics = Metrics(settings.run.logs(self.attempt) / f"metrics-rank{self.group.rank}.jsonl")
        self.page = _open_page(settings)
        self._report = self.page if settings.local_rank == 0 else None
        self._place = Place()
        self._rng: dict[str, Any] | None = None
        self._loader_seeds: list[int] = []  # one a rank, the same over all attempts
        self._step_s = 0.0
        self._looped = False
        state = engine.TrainState(model=model, optimizers=_as_tuple(optimizer), scheduler=scheduler, extra=extra or {})
        self._saver = self._open_saver(state)
        self._restore()

    @property
    def epoch(self) -> int:
        """Return the epoch that the next batch starts in, from 0."""
        return self.sampler.epoch if self.sampler is not None else self._place.epoch

    def steps(self, loader: Iterable[Any], *, until: int) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) from the step after the restored one up to `until`, steps counted from 1.

        The loader is started anew at the end of each epoch. After each step's body this saves if a save is due. When
        the gang is asked to stop it saves at the agreed step and raises SystemExit(0). After step `until` it saves,
        and the loop ends; what follows in the script runs on the finished model. A run has one such loop: a second
        call raises UsageError, since the end was told, and a position in the data means nothing to another loader.
        """
        if self._looped:
            raise UsageError(
                "run.steps(...) was called a second time",
                fix="train in one loop up to the last step; it starts the loader anew each epoch. For phases, let the "
                "loader, or the loop's body, change at a step",
            )
        self._looped = True
        protect_workers(loader)
        size = batch_size_of(loader, self.sampler) if self.sampler is not None else 0
        agreement = self._agreement(until)
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None
        batches = self._batches(loader)
        began = time.time()
        while self.step < until:
            place, batch = next(batches)
            yield self.step + 1, batch
            self.step += 1
            self._place = place
            if self.sampler is not None:
                self.sampler.advance(size)
            self._after_step(began)
            if self.step < until:
                self._save_if_due()
                began = time.time()  # what a save takes is none of the next step's time
                if agreement is not None and agreement.flags.stop_requested:
                    self._stop_if_agreed(agreement)
        self._finish(agreement)

    def log(self, step: int, **values: Any) -> None:
        """Add one line to this rank's metrics file (RUN/logs/<attempt>/metrics-rank<R>.jsonl).

        It is written before the next checkpoint is complete, and at the end.
        """
        self.metrics.log(step, values)

    def _open_saver(self, state: engine.TrainState) -> Saver:
        settings = self.settings
        identity = engine.Identity(
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
            keep=settings.keep,
            page=settings.page if self.group.rank == 0 else None,
        )
        saver = Saver(
            state=state,
            identity=identity,
            engine=Engine(setup, self.group, say=say),
            group=self.group,
            ledger=self.ledger,
            page=self._report,
        )
        saver.engine.start()  # it takes a moment, and the first save need not wait for it
        if torch.cuda.is_available():
            for optimizer in state.optimizers:
                optimizer.register_step_pre_hook(lambda *_: saver.before_update())
        return saver

    def _batches(self, loader: Iterable[Any]) -> Iterator[tuple[Place, Any]]:
        seeds, rank = self._loader_seeds, self.group.rank
        mine = seeds[rank] if rank < len(seeds) else rng.draw_seed()
        self._loader_seeds = self.group.gather(mine)
        if self.sampler is not None:
            return stream(loader, rng.mix(mine, self.step))
        return endless(loader, self._place, mine)

    def _after_step(self, began: float) -> None:
        now = time.time()
        if self._report is not None:
            self._report.report_step(self.step, now)
        if not self._step_s and self.group.rank == 0:
            self.ledger.append("first-step", attempt=self.attempt, step=self.step)
        # a moving average over about ten steps; the first step of an attempt (compiling, caching) soon fades
        self._step_s = 0.9 * self._step_s + 0.1 * (now - began) if self._step_s else max(now - began, 1e-9)

    def _save_if_due(self) -> None:
        if self.settings.every is not None and self.step % self.settings.every == 0:
            self.metrics.flush()
            self._saver.save(self.step, self._position())

    def _stop_if_agreed(self, agreement: StopAgreement) -> None:
        decision = agreement.at_boundary(self.step, Costs(step_s=self._step_s, save_s=self._cost_of_save()))
        if decision is not None:
            self._stop(decision)

    def _cost_of_save(self) -> float | None:
        # what a due save has just saved at the target costs nothing more
        return 0.0 if self._saver.saved_step == self.step else self._saver.cost_s

    def _stop(self, decision: Decision) -> NoReturn:
        """End this rank at the agreed step, saved if that is possible: the exit code is 0 in any case."""
        self.metrics.flush()
        if self.group.rank == 0:
            self.ledger.append("stop-step", attempt=self.attempt, step=self.step)
            say(f"stopping at step {self.step}" + (f" without a save: {decision.why}" if decision.why else ""))
        saved = self._saver.saved(self.step, within_s=None if decision.save else decision.left_s)
        if not saved and decision.save:
            saved = self._saver.save_and_leave(self.step, self._position())
        elif not saved and self.group.rank == 0:
            self.ledger.append(
                "final-save-skipped",
                attempt=self.attempt,
                step=self.step,
                predicted_s=decision.predicted_s,
                left_s=decision.left_s,
                why=decision.why,
            )
        self._tell(Outcome.STOPPED if saved else Outcome.STOPPED_UNSAVED)
        self._saver.close()
        end_workers()  # a loader would give them five seconds each, and a notice has none to spare
        raise SystemExit(0)

    def _finish(self, agreement: StopAgreement | None) -> None:
        """Save the end of the run. Raises IncompleteError if it cannot be saved."""
        if agreement is not None:
            agreement.at_end()
        self.metrics.flush()
        step = self.step
        if not self._saver.saved(step) and not self._saver.save_and_leave(step, self._position()):
            raise IncompleteError(
                f"the end of the run (step {self.step}) could not be saved",
                where=str(self.settings.run.checkpoints),
                fix="the ledger says why; once that is mended, submit the job again: it goes on from the last save",
            )
        self._tell(Outcome.DONE)
        self._saver.close()

    def _tell(self, outcome: Outcome) -> None:
        """Say how this node's ranks end. The other ranks of a node wait for the one that says it.

        Rank 0 may still be committing then. A neighbour that ended badly now (torch can abort in teardown) would have
        torchrun end rank 0 in the middle of it.
        """
        if self._report is not None:
            self._report.report_outcome(outcome)
        elif self.page is not None:
            end = time.monotonic() + _NEIGHBOUR_S
            while self.page.outcome is Outcome.NONE and time.monotonic() < end:
                time.sleep(_PAGE_PERIOD_S)

    def _agreement(self, until: int) -> StopAgreement | None:
        if self.page is None:
            return None
        return StopAgreement(
            store=_stop_store(self.settings, self.attempt, self.group),
            flags=self.page,
            rank=self.group.rank,
            world=self.group.world,
            until=until,
        )

    def _position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self._place.batches,
            "sampler": self.sampler.state_dict() if self.sampler is not None else None,
            "loader_seeds": self._loader_seeds,
            "rng": rng.file_name(0).replace("00000", "<rank>"),
        }

    def _restore(self) -> None:
        began = time.time()
        settings = self.settings
        whole = find_whole(settings.run, settings.store, self.group, self.ledger, self.attempt, self._load)
        if whole is not None:
            self._take_up(whole)
        if self.group.rank != 0:
            return
        if whole is None:
            self.ledger.append("fresh", attempt=self.attempt)
            say("no checkpoint yet: starting at step 0")
        else:
            seconds = round(time.time() - began, 3)
            point = whole.point
            self.ledger.append(
                "resumed", attempt=self.attempt, name=point.name, step=point.step, tier=point.tier, seconds=seconds
            )
            say(f"resumed from {point.name} ({point.tier}) at step {point.step}")

    def _load(self, folder: Path, manifest: mf.Manifest) -> tuple[engine.Loaded, frozenset[str]]:
        if (self.sampler is None) != (manifest.position.get("sampler") is None):
            raise UsageError(
                "the checkpoint was saved with a ResumableSampler and this script has none, or the other way round",
                where=str(folder),
                fix="keep the sampler of a run as it was, or start a new run directory",
            )
        loaded = engine.load(self._saver.state, folder, manifest, self.group)
        return loaded, loaded.verified

    def _take_up(self, whole: Restorable[engine.Loaded]) -> None:
        position, loaded = whole.manifest.position, whole.loaded
        assert loaded is not None  # it was given a load
        if loaded.dealt and self.group.rank == 0:
            names, by = ", ".join(loaded.dealt), loaded.saved_by
            say(f"extra {names} was saved by {by} ranks, each its own: rank r goes on with what rank r % {by} had")
        if self.sampler is not None:
            self.sampler.load_state_dict(dict(position["sampler"]))
        self._place = Place(int(position["epoch"]), int(position["batch"]))
        self._loader_seeds = list(position.get("loader_seeds", []))
        self._rng = loaded.random
        self.step = whole.point.step
        self._saver.parent, self._saver.saved_step = whole.point.name, whole.point.step


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


def _topology(settings: Settings, group: Group) -> dict[str, Any]:
    return {
        "world_size": group.world,
        "ranks_per_node": settings.local_world_size,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "job_id": os.environ.get("SLURM_JOB_ID", ""),
    }


def _as_tuple(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
