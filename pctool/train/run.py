"""`Run`: restore, iterate, save when due and at the agreed stop, all in one loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import rng
from pctool.checkpoint.checkpointer import Checkpointer, Restored
from pctool.checkpoint.saving import say
from pctool.checkpoint.torch import TrainState
from pctool.errors import UsageError
from pctool.train.loading import Place, batch_size_of, endless, protect_workers, stream
from pctool.train.metrics import Metrics
from pctool.train.sampler import ResumableSampler
from pctool.train.session import Session


class Run:
    """One training run, over all its attempts.

    Making it restores the newest complete checkpoint, or starts at step 0 where there is none. `model` may be wrapped
    in DDP or sharded by FSDP2; `optimizer` may be one or several; `extra` holds further objects with `state_dict` and
    `load_state_dict` by name, whose state is each rank's own (a module's is one over all ranks). A checkpoint is saved
    `every` so many steps, or "10min", or "auto"; at the stop; and at the end. The `keep` newest stay, those younger
    than `keep_for` ("7d"), and one in each `keep_every` steps for good; with none of them, all. What the job spec says
    wins over these. A new run begins from `start_from`, another run's directory or checkpoint, at its step and place in
    the data; that run keeps it. Checkpoints lie in the run directory of the job; without pctool's batch script in
    `run_dir`, by default ./run. A save stalls the training for a copy into host memory; it is complete a while later.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        sampler: ResumableSampler | None = None,
        every: int | str | None = None,
        keep: int | None = None,
        keep_for: str | None = None,
        keep_every: int | None = None,
        run_dir: str | None = None,
        store: str | None = None,
        start_from: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        checkpointer = Checkpointer(
            run_dir,
            mirror=store,
            every=every,
            keep=keep,
            keep_for=keep_for,
            keep_every=keep_every,
            start_from=start_from,
        )
        self.settings = checkpointer.settings
        self.group = checkpointer.group
        self.attempt = checkpointer.attempt
        self.ledger = checkpointer.ledger
        self.page = checkpointer.page
        self.sampler = sampler
        self.metrics = Metrics(self.settings.run.logs(self.attempt) / f"metrics-rank{self.group.rank}.jsonl")
        self._place = Place()
        self._rng: dict[str, Any] | None = None
        self._loader_seeds: list[int] = []  # one a rank, the same over all attempts
        self._looped = False
        state = TrainState(model=model, optimizers=_as_tuple(optimizer), scheduler=scheduler, extra=extra or {})
        self._session = Session(checkpointer, state, position=self._position, before_save=self.metrics.flush)
        restored = self._session.restore(self._check_sampler)
        if restored is not None:
            self._take_up(restored)

    @property
    def step(self) -> int:
        """Return the steps done, over all attempts."""
        return self._session.step

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
        self._session.begin(until)
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None
        batches = self._batches(loader)
        began = time.time()
        while self.step < until:
            place, batch = next(batches)
            yield self.step + 1, batch
            self._place = place
            if self.sampler is not None:
                self.sampler.advance(size)
            self._session.after_step(began)
            began = time.time()  # what a save takes is none of the next step's time
        self._session.finish()

    def log(self, step: int, **values: Any) -> None:
        """Add one line to this rank's metrics file (RUN/logs/<attempt>/metrics-rank<R>.jsonl).

        It is written before the next checkpoint is complete, and at the end.
        """
        self.metrics.log(step, values)

    def _batches(self, loader: Iterable[Any]) -> Iterator[tuple[Place, Any]]:
        seeds, rank = self._loader_seeds, self.group.rank
        mine = seeds[rank] if rank < len(seeds) else rng.draw_seed()
        self._loader_seeds = self.group.gather(mine)
        if self.sampler is not None:
            return stream(loader, rng.mix(mine, self.step))
        return endless(loader, self._place, mine)

    def _position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self._place.batches,
            "sampler": self.sampler.state_dict() if self.sampler is not None else None,
            "loader_seeds": self._loader_seeds,
            "rng": rng.file_name(0).replace("00000", "<rank>"),
        }

    def _check_sampler(self, manifest: mf.Manifest, folder: Path) -> None:
        if (self.sampler is None) != (manifest.position.get("sampler") is None):
            raise UsageError(
                "the checkpoint was saved with a ResumableSampler and this script has none, or the other way round",
                where=str(folder),
                fix="keep the sampler of a run as it was, or start a new run directory",
            )

    def _take_up(self, restored: Restored) -> None:
        position, loaded = restored.position, restored.loaded
        if loaded.dealt and self.group.rank == 0:
            names, by = ", ".join(loaded.dealt), loaded.saved_by
            say(f"extra {names} was saved by {by} ranks, each its own: rank r goes on with what rank r % {by} had")
        if self.sampler is not None:
            self.sampler.load_state_dict(dict(position["sampler"]))
        elif position["batch"] and restored.world_size != self.group.world and self.group.rank == 0:
            say(
                f"the loader's place (batch {position['batch']} of epoch {position['epoch']}) is that of "
                f"{restored.world_size} ranks: on {self.group.world} the rest of this epoch repeats some samples "
                "or leaves some out; a ResumableSampler goes on exactly"
            )
        self._place = Place(int(position["epoch"]), int(position["batch"]))
        self._loader_seeds = list(position.get("loader_seeds", []))
        self._rng = loaded.random


def _as_tuple(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
