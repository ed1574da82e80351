"""`PctoolCallback` for Lightning's `Trainer`: complete checkpoints, resuming without a flag, and the agreed stop.

Weights and optimizers go through pctool's engine; all else that a Lightning checkpoint holds (loops, schedulers,
callbacks, data module, precision, what hooks add) is asked from and given back to Lightning, which makes of it what it
does with a checkpoint of its own. `on_fit_start` is the place: models are wrapped and optimizers made by then, and what
it leaves is taken up before the loops begin.

A step is a batch after which the optimizers stepped. What is due after it happens at the start of the next batch: then
it is logged and validated, and the next batch is drawn, so that the random states are put back at the same place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pctool.errors import UsageError

try:
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.callbacks import Callback, Timer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
except ImportError as error:
    raise UsageError(
        f"pctool.train.lightning needs lightning: {error}", fix="pip install 'pctool[lightning]'"
    ) from error

import torch.distributed as dist

from pctool.checkpoint.checkpointer import Checkpointer, Restored
from pctool.checkpoint.manifest import Manifest
from pctool.checkpoint.saving import say
from pctool.checkpoint.torch import TrainState
from pctool.train.loading import protect_workers
from pctool.train.rewind import Rewind, is_stateful, rewindable
from pctool.train.session import Session

__all__ = ["PctoolCallback"]

_NO_END = 2**62  # the last step of a run that ends at no step that is known before


class PctoolCallback(Callback):  # type: ignore[misc]  # lightning is not followed by mypy
    """Save and resume a Trainer's fit with pctool, and stop with the gang.

        trainer = Trainer(..., callbacks=[PctoolCallback(every="10min", keep=3)])
        trainer.fit(model, loader)

    `fit()` goes on from the newest complete checkpoint, or starts at step 0 where there is none: model, optimizers,
    schedulers, precision, random states, loops, callbacks, data module, and the place in the epoch. A run that has
    ended trains nothing. At a stop `fit()` raises SystemExit(0). The arguments are those of
    `pctool.checkpoint.Checkpointer`. Raises UsageError for a trainer that this cannot save.
    """

    def __init__(
        self,
        *,
        every: int | str | None = None,
        keep: int | None = None,
        keep_for: str | None = None,
        keep_every: int | None = None,
        run_dir: str | None = None,
        store: str | None = None,
    ) -> None:
        self._wishes: dict[str, Any] = {
            "run_dir": run_dir,
            "mirror": store,
            "every": every,
            "keep": keep,
            "keep_for": keep_for,
            "keep_every": keep_every,
        }
        self._session: Session | None = None
        self._rest: _Rest | None = None
        self._restored: Restored | None = None
        self._used = self._finished = False
        self._began = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be saved, and see to it that the data can be taken up."""
        if stage != "fit":
            return
        _refuse_unsupported(trainer)
        if self._used:
            raise UsageError(
                "fit() was called a second time with the same PctoolCallback",
                fix="train up to the last step in one call; give another training a Trainer and a run_dir of its own",
            )
        self._used = True
        _leave_requeue_to_pctool(trainer)
        checkpointer = Checkpointer(**self._wishes)
        self._rest = rest = _Rest(trainer)
        # the state is made when all that is in it exists
        self._session = Session(checkpointer, TrainState(model=pl_module), position=lambda: self._position(trainer))
        fit_loop = trainer.fit_loop
        load_states = fit_loop._load_combined_loader_states

        def with_rewind() -> None:
            _make_rewindable(fit_loop._combined_loader, rest.rewind)
            load_states()

        fit_loop._load_combined_loader_states = with_rewind  # called when the loaders are as they will be

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest complete checkpoint, if there is one."""
        session, rest = self._session, self._rest
        assert session is not None
        assert rest is not None
        session.state = TrainState(
            model=trainer.strategy.model, optimizers=tuple(trainer.optimizers), extra={"lightning": rest}
        )
        self._restored = session.restore(_check)
        if self._restored is None:
            return
        if trainer.ckpt_path:
            say("ckpt_path is left alone: this run has a checkpoint of its own")
        rest.take_up()
        if _is_over(self._restored.position, trainer):
            self._finished = trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count the steps; all that is restored is in place by now."""
        session, rest = self._session, self._rest
        assert session is not None
        assert rest is not None
        loop = trainer.fit_loop
        if self._restored is None:
            session.step = loop.epoch_loop._batches_that_stepped
        else:
            rest.rewind.skip = loop.epoch_loop.batch_progress.current.completed if loop.restarting else 0
            _start_data_anew(loop)
        session.begin(_last_step(trainer))
        self._began = time.time()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Do what is due after the step before: all of it is over now. Raises SystemExit(0) at the agreed step."""
        session, rest = self._session, self._rest
        assert session is not None
        assert rest is not None
        if self._restored is not None:
            # going on right behind a validation, Lightning counts that step twice
            trainer.fit_loop.epoch_loop._batches_that_stepped = session.step
            self._restored.restore_random()
            self._restored = None
        rest.in_batch = True
        self._after_step(trainer, last=False)
        rest.in_batch = False

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Note where a loader that has a state of its own stands: by the next batch it will have gone on."""
        if self._rest is not None:
            self._rest.note_loaders()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end, and return once it is complete."""
        session = self._session
        assert session is not None
        self._after_step(trainer, last=True)
        self._finished = True
        session.finish()
        self._session = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say that the run is over, where there was nothing left to train."""
        if self._session is not None:
            self._session.begin(self._session.step)
            self._session.finish()
            self._session = None

    def _after_step(self, trainer: Any, *, last: bool) -> None:
        session = self._session
        assert session is not None
        if trainer.fit_loop.epoch_loop._batches_that_stepped > session.step:
            session.after_step(self._began, last=last)
        self._began = time.time()

    def _position(self, trainer: Any) -> Mapping[str, Any]:
        return {
            "epoch": trainer.current_epoch,
            "batch": trainer.fit_loop.epoch_loop.batch_progress.current.completed,
            "global_step": trainer.global_step,
            "finished": self._finished,
            "length": _length(trainer),
        }


class _Rest:
    """What a Lightning checkpoint holds besides weights and optimizers, as one part of a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.rewind = Rewind(lambda: trainer.current_epoch)
        self.in_batch = False  # a batch has been drawn, and counted, that is not part of what is saved
        self._loaded: dict[str, Any] = {}
        self._loaders: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's own checkpoint as of the end of the last step."""
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"], checkpoint["optimizer_states"]
        fit_loop = checkpoint["loops"]["fit_loop"]
        if self.in_batch:
            progress = fit_loop["epoch_loop.batch_progress"]
            for counts in (progress["total"], progress["current"]):
                counts["ready"] -= 1
            progress["is_last_batch"] = False
            if self._loaders:
                fit_loop["state_dict"]["combined_loader"] = self._loaders
        return {"checkpoint": checkpoint, "seed": self.rewind.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `take_up`."""
        self._loaded = state["checkpoint"]
        self.rewind.seed = state["seed"]

    def take_up(self) -> None:
        """Give Lightning the state as its own checkpoint: it takes up the rest of it before the loops begin."""
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        connector._loaded_checkpoint = {**self._loaded, "optimizer_states": []}  # those are loaded
        connector.restore_datamodule()
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", connector._loaded_checkpoint)
        connector.restore_callbacks()
        self._loaded = {}

    def note_loaders(self) -> None:
        """Ask the loaders that have a state of their own for it."""
        loader = self._trainer.fit_loop._combined_loader
        if any(is_stateful(part) for part in loader.flattened):
            self._loaders = loader._state_dicts()


def _make_rewindable(combined: Any, rewind: Rewind) -> None:
    """Have the train loaders begin each epoch as `rewind` says, but for those that have a state of their own."""
    parts = combined.flattened
    own = [part for part in parts if not is_stateful(part)]
    if own and len(parts) > 1:
        raise UsageError(
            "there are several train data loaders, and not all of them can say where they stand",
            fix="give each state_dict and load_state_dict (as torchdata's StatefulDataLoader has), or use one loader",
        )
    for part in parts:
        protect_workers(part)
    for part in own:
        rewindable(part, rewind)


def _start_data_anew(loop: Any) -> None:
    """Begin with the data where the run stands, also if the loaders were made before that was known."""
    combined, waiting = loop._combined_loader, loop._combined_loader_states_to_load
    if waiting and loop.restarting:
        combined._load_state_dicts(waiting)
        loop._combined_loader_states_to_load = []
    elif any(is_stateful(part) for part in combined.flattened):
        return  # they have begun where they should
    iter(loop._data_fetcher)


def _last_step(trainer: Any) -> int:
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < _NO_END else _NO_END


def _length(trainer: Any) -> dict[str, Any]:
    return {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}


def _is_over(position: Mapping[str, Any], trainer: Any) -> bool:
    """Return whether a run has ended, and is not asked to go further now."""
    return bool(position["finished"]) and dict(position["length"]) == _length(trainer)


def _check(manifest: Manifest, folder: Path) -> None:
    """Raise UsageError for a checkpoint of another loop, and for a place in the data that means other samples now."""
    position, now = manifest.position, dist.get_world_size() if dist.is_initialized() else 1
    if "global_step" not in position:
        raise UsageError(
            "the checkpoint was not saved by Lightning with a PctoolCallback",
            where=str(folder),
            fix="give this training a run directory of its own",
        )
    if position["batch"] and not position["finished"] and manifest.world_size != now:
        raise UsageError(
            f"the run stands at batch {position['batch']} of an epoch that {manifest.world_size} ranks shared, and has "
            f"{now} ranks now",
            where=str(folder),
            fix="start it with as many ranks as before; from the beginning of an epoch another number would do",
        )


def _refuse_unsupported(trainer: Any) -> None:
    """Raise UsageError for what cannot be saved, or not be put back where it was."""
    if sum(isinstance(callback, PctoolCallback) for callback in trainer.callbacks) > 1:
        raise UsageError("this Trainer has several PctoolCallbacks", fix="give it one")
    strategy = trainer.strategy
    if type(strategy) is not SingleDeviceStrategy and not isinstance(strategy, DDPStrategy):
        raise UsageError(
            f"{type(strategy).__name__} is not supported: pctool does not see its state as Lightning keeps it",
            fix='use strategy="ddp", or for sharded models a loop of your own (see docs/frameworks.md)',
        )
    if isinstance(strategy, DDPStrategy) and strategy._start_method != "popen":
        raise UsageError(
            f"ranks that are made by {strategy._start_method} cannot end on their own",
            fix='use strategy="ddp", and start the script with torchrun',
        )
    timed = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # max_time becomes one
    if trainer.max_epochs == -1 and trainer.max_steps == -1 and not timed:
        raise UsageError("the Trainer has no end", fix="give it max_steps, max_epochs or max_time")
    if trainer.fast_dev_run:
        raise UsageError("a fast_dev_run is no run to save", fix="leave PctoolCallback out of it")


def _leave_requeue_to_pctool(trainer: Any) -> None:
    """Switch Lightning's own requeue off: a job that two requeue is requeued twice."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        environment.auto_requeue = False
        if trainer.is_global_zero:
            say("Lightning's auto_requeue is switched off: pctool's batch script requeues the job")
