"""`PctoolCallback` for Hugging Face's `Trainer`: complete checkpoints, resuming without a flag, and the agreed stop.

A callback alone could not resume. `Trainer.train` computes epochs and the batches to skip before it calls any callback,
and hands callbacks no trainer. So this one is given the trainer, and stands in for some of its methods: `train` (to
tell it where the run stands), the two that would load weights and optimizer from files (to use the engine instead),
and the one that loads the best model (to save the end before). What is done with the position (the epoch, the skipped
batches, the sampler's order) is Trainer's own.

A step is an optimizer step. What is due after it happens at the beginning of the next one: then the step is logged,
evaluated and saved by Trainer, and the next batch is drawn, so that the random states are put back at the same place.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pctool.errors import UsageError

try:
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState, TrainerControl
except ImportError as error:
    raise UsageError(f"pctool.train.hf needs transformers: {error}", fix="pip install 'pctool[hf]'") from error

from pctool.checkpoint.checkpointer import Checkpointer, Restored
from pctool.checkpoint.manifest import Manifest
from pctool.checkpoint.saving import say
from pctool.checkpoint.torch import TrainState
from pctool.train.loading import protect_workers
from pctool.train.session import Session

__all__ = ["PctoolCallback"]

_BEYOND = 2**100  # as a global step it lies behind every epoch, so that Trainer trains nothing
_STATE_FILE = "trainer_state.json"  # Trainer's own name for it
# what this start of the Trainer knows better than the checkpoint
_OWN_FIELDS = frozenset(
    {"max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"}
    | {"is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params"}
)


class PctoolCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Save and resume a Trainer's run with pctool, and stop with the gang.

        trainer = Trainer(...)
        trainer.add_callback(PctoolCallback(trainer, every=500, keep=3))
        trainer.train()

    `train()` goes on from the newest complete checkpoint, or starts at step 0 where there is none: model, optimizer,
    scheduler, gradient scaler, random states, TrainerState and the callbacks' states, and the place in the epoch. A run
    that has ended trains nothing. At a stop `train()` raises SystemExit(0). The arguments are those of
    `pctool.checkpoint.Checkpointer`. Raises UsageError for a trainer that this cannot save.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int | str | None = None,
        keep: int | None = None,
        keep_for: str | None = None,
        keep_every: int | None = None,
        run_dir: str | None = None,
        store: str | None = None,
    ) -> None:
        _refuse_twice(trainer)
        self._trainer = trainer
        self._wishes: dict[str, Any] = {
            "run_dir": run_dir,
            "mirror": store,
            "every": every,
            "keep": keep,
            "keep_for": keep_for,
            "keep_every": keep_every,
        }
        self._session: Session | None = None
        self._expected: Manifest | None = None
        self._restored: Restored | None = None
        self._finished = False
        self._began = 0.0
        self._stand_in()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count the steps; all that is restored is in place by now."""
        session = self._session
        assert session is not None
        self._restore()
        self._take_up_state()
        session.step = state.global_step
        session.begin(max(state.max_steps, state.global_step))
        protect_workers(kwargs.get("train_dataloader"))
        self._began = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do what is due after the step before: all of it is over now. Raises SystemExit(0) at the agreed step."""
        self._after_step(last=False)
        if self._restored is not None:
            self._restored.restore_random()
            self._restored = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the end, and return once it is complete."""
        self._finish()

    def _stand_in(self) -> None:
        """Put our methods in the place of the trainer's, on this one trainer."""
        trainer = self._trainer
        self._train, self._load_best = trainer.train, trainer._load_best_model
        self._load_model, self._load_optimizer = trainer._load_from_checkpoint, trainer._load_optimizer_and_scheduler
        trainer.train = self._train_on
        trainer._load_best_model = self._load_best_model
        trainer._load_from_checkpoint = self._load_from_checkpoint
        trainer._load_optimizer_and_scheduler = self._load_optimizer_and_scheduler

    def _train_on(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the newest complete checkpoint on; where there is none, as `train` was told."""
        self._open()
        assert self._session is not None
        self._expected = self._session.checkpointer.newest()
        while True:
            if self._expected is not None:
                _check_kind(self._expected, self._session.checkpointer.settings.run.path)
            try:
                if self._expected is None:
                    return self._train(resume_from_checkpoint, *args, **kwargs)
                if resume_from_checkpoint:
                    say("resume_from_checkpoint is left alone: this run has a checkpoint of its own")
                with self._folder(self._expected) as folder:
                    return self._train(folder, *args, **kwargs)
            except _OtherCheckpointError as other:
                # the newest one is damaged: Trainer has to compute its position anew
                self._expected = other.manifest

    def _open(self) -> None:
        if self._session is not None:
            raise UsageError(
                "train() was called a second time with the same PctoolCallback",
                fix="train up to the last step in one call; give another training a Trainer and a run_dir of its own",
            )
        if self not in self._trainer.callback_handler.callbacks:
            raise UsageError(
                "the PctoolCallback was made for this trainer, but not given to it",
                fix="call trainer.add_callback(PctoolCallback(trainer, ...))",
            )
        _refuse_unsupported(self._trainer)
        # the state is made when all that is in it exists
        self._session = Session(Checkpointer(**self._wishes), _NOTHING, position=self._position)

    @contextmanager
    def _folder(self, manifest: Manifest) -> Iterator[str]:
        """Yield a folder that tells `train` where the run stands; all the rest is loaded by our methods."""
        trainer, position = self._trainer, manifest.position
        args = trainer.args
        beyond = _is_over(position, args)
        state = TrainerState(
            global_step=_BEYOND if beyond else manifest.step,
            train_batch_size=trainer._train_batch_size,
            **{name: value for name in ("logging_steps", "eval_steps", "save_steps") if (value := getattr(args, name))},
        )
        with tempfile.TemporaryDirectory(prefix="pctool-") as folder:
            state.save_to_json(str(Path(folder) / _STATE_FILE))
            yield folder

    def _load_from_checkpoint(self, folder: str, *args: Any, **kwargs: Any) -> None:
        """Load nothing yet, where the run goes on: weights come with the optimizer, once that is there."""
        if self._expected is None:
            self._load_model(folder, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        """Load model, optimizer, scheduler and the rest with pctool's engine, where the run goes on."""
        if self._expected is None:
            self._load_optimizer(folder)
            return
        self._restore()
        self._take_up_state()

    def _load_best_model(self) -> None:
        """Save the end first: what the run would go on from is the last step, not the best one."""
        self._finish()
        self._load_best()

    def _restore(self) -> None:
        session, trainer = self._session, self._trainer
        assert session is not None
        if not isinstance(session.state, _Nothing):
            return
        scaler = getattr(trainer.accelerator, "scaler", None)
        session.state = TrainState(
            model=trainer.model_wrapped,
            optimizers=(getattr(trainer.optimizer, "optimizer", trainer.optimizer),),  # accelerate wraps it
            scheduler=trainer.lr_scheduler,
            extra={"trainer": _TrainerParts(trainer)} | ({"scaler": scaler} if scaler is not None else {}),
        )
        found: list[Manifest] = []

        def check(manifest: Manifest, folder: Path) -> None:
            found[:] = [manifest]
            _check_batch(manifest, trainer, folder)

        restored = session.restore(check)
        manifest = found[0] if restored is not None else None
        if manifest != self._expected:
            session.state = _NOTHING
            raise _OtherCheckpointError(manifest)
        self._restored = restored

    def _take_up_state(self) -> None:
        """Put TrainerState and the callbacks' states back, if Trainer has not made its state anew since."""
        if self._expected is not None and self._session is not None:
            self._session.state.extra["trainer"].take_up()
            self._trainer.state.compute_steps(self._trainer.args, self._trainer.state.max_steps)

    def _after_step(self, *, last: bool) -> None:
        session = self._session
        assert session is not None
        if self._trainer.state.global_step > session.step:
            self._finished = last
            session.after_step(self._began, last=last)
        if not last:
            self._began = time.time()

    def _finish(self) -> None:
        if self._session is None or self._finished:
            return
        self._after_step(last=True)
        self._finished = True
        self._session.finish()

    def _position(self) -> Mapping[str, Any]:
        args, state = self._trainer.args, self._trainer.state
        return {
            "epoch": state.epoch,
            "finished": self._finished,
            "length": _length(args),
            "batch": _global_batch(self._trainer),
        }


class _Nothing:
    """In the place of the state until there is one."""


_NOTHING: Any = _Nothing()


class _OtherCheckpointError(Exception):
    """The checkpoint that was restored is not the one that Trainer computed its position for."""

    def __init__(self, manifest: Manifest | None) -> None:
        super().__init__()
        self.manifest = manifest


class _TrainerParts:
    """TrainerState and the states of the callbacks that have one, as one part of a checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        self._trainer.store_flos()
        fields = {field.name: getattr(self._trainer.state, field.name) for field in dataclasses.fields(TrainerState)}
        names = fields.keys() - _OWN_FIELDS - {"stateful_callbacks"}
        state = {name: fields[name] for name in sorted(names)}
        return {"state": state, "callbacks": [[type(part).__name__, part.state()] for part in self._parts()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `take_up`: Trainer may make its own anew in between."""
        self._loaded = state

    def take_up(self) -> None:
        """Put the loaded state into the trainer."""
        if self._loaded is None:
            return
        for name, value in self._loaded["state"].items():
            setattr(self._trainer.state, name, value)
        waiting = list(self._loaded["callbacks"])
        for part in self._parts():
            found = next((entry for entry in waiting if entry[0] == type(part).__name__), None)
            if found is not None:
                waiting.remove(found)
                for name, value in found[1].get("attributes", {}).items():
                    setattr(part, name, value)
        # what Trainer's own checkpoints keep of the callbacks; it wants a place for each
        kept = [*self._parts(), self._trainer.control]
        self._trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=kept).stateful_callbacks

    def _parts(self) -> list[Any]:
        # TrainerControl's switches are set anew at the beginning of each step, epoch and training
        return [
            part
            for part in self._trainer.callback_handler.callbacks
            if isinstance(part, ExportableState) and not isinstance(part, TrainerControl)
        ]


def _length(args: Any) -> dict[str, Any]:
    return {"max_steps": args.max_steps, "num_train_epochs": args.num_train_epochs}


def _global_batch(trainer: Any) -> int:
    args = trainer.args
    return int(trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _is_over(position: Mapping[str, Any], args: Any) -> bool:
    """Return whether a run has ended, and is not asked to go further now."""
    return bool(position["finished"]) and dict(position["length"]) == _length(args)


def _check_kind(manifest: Manifest, run: Path) -> None:
    if not {"finished", "length", "batch"} <= manifest.position.keys():
        raise UsageError(
            f"the checkpoint of step {manifest.step} was not saved by a Trainer with a PctoolCallback",
            where=str(run),
            fix="give this training a run directory of its own",
        )


def _check_batch(manifest: Manifest, trainer: Any, folder: Path) -> None:
    """Raise UsageError if the position, which Trainer counts in steps of an epoch, means other samples now."""
    was, now = int(manifest.position["batch"]), _global_batch(trainer)
    if was != now and not trainer.args.ignore_data_skip:
        raise UsageError(
            f"a step had {was} samples over all ranks and has {now} now, and Trainer counts its place in the data in "
            "steps",
            where=str(folder),
            fix="keep per_device_train_batch_size x gradient_accumulation_steps x ranks as it was, or let the epoch "
            "begin anew with ignore_data_skip=True",
        )


def _refuse_twice(trainer: Any) -> None:
    handler = getattr(trainer, "callback_handler", None)
    if handler is None:
        raise UsageError(
            f"PctoolCallback was given a {type(trainer).__name__} in the place of its trainer",
            fix="make the Trainer first, then call trainer.add_callback(PctoolCallback(trainer, ...))",
        )
    if any(isinstance(callback, PctoolCallback) for callback in handler.callbacks):
        raise UsageError("this trainer has a PctoolCallback already", fix="give it one")


def _refuse_unsupported(trainer: Any) -> None:
    """Raise UsageError for what cannot be saved, or not be put back where it was."""
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise UsageError("DeepSpeed keeps its state where pctool does not see it", fix="use DDP")
    if trainer.is_fsdp_enabled:
        raise UsageError(
            "a Trainer that shards the model (fsdp=...) is not supported: its checkpoints have not been proven",
            fix="use DDP, or a loop of your own with FSDP2 and pctool.checkpoint.Checkpointer (docs/frameworks.md)",
        )
    if args.world_size == 1 and args.n_gpu > 1:
        raise UsageError("torch.nn.DataParallel is not supported", fix="start the script with torchrun")
    if args.auto_find_batch_size:
        raise UsageError("auto_find_batch_size changes what a step is", fix="set per_device_train_batch_size")
    if not getattr(args.accelerator_config, "use_seedable_sampler", True):
        raise UsageError(
            "without use_seedable_sampler the order of an epoch cannot be had again",
            fix="leave use_seedable_sampler of accelerator_config as it is by default",
        )
