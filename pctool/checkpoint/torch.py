"""What of a training job is saved, and how it is loaded again from torch.distributed.checkpoint's own files.

Any DCP reader loads them (`dcp.load`, `dcp_to_torch_save`); MANIFEST and the ranks' random states lie beside them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import own as per_rank
from pctool.checkpoint import rng
from pctool.checkpoint.group import Group
from pctool.checkpoint.reader import METADATA, DamagedFileError, VerifiedReader
from pctool.checkpoint.stores import StoreUnreadableError
from pctool.errors import UsageError
from pctool.run.layout import RunDir

T = TypeVar("T")

__all__ = ["METADATA", "Identity", "Loaded", "State", "TrainState", "load", "quiet"]


class State(Protocol):
    """What is saved and loaded: `TrainState`, or `PlainState`."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return the objects whose state may be each rank's own, by name."""

    @property
    def has_own(self) -> bool:
        """Return whether anything may be each rank's own."""

    @property
    def updates(self) -> bool:
        """Return whether it is said when the weights are about to change (`Saver.before_update`)."""

    def collect(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return what is one value over all ranks, and what is this rank's own (pickled, by name)."""

    def late_pointers(self) -> frozenset[int]:
        """Return the data pointers of the tensors that nothing changes before the optimizer's next step."""

    def template(self, own: Collection[str]) -> dict[str, Any]:
        """Return what is to be loaded into: all but the `own` ones, which need nothing to come back."""

    def apply(self, state: dict[str, Any]) -> None:
        """Put a loaded dictionary back."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What is saved: the model, its optimizers, a scheduler, and anything else with state_dict/load_state_dict.

    A module in `extra`, and what holds sharded tensors, is saved like the model, as one value over all ranks. Anything
    else there is each rank's own and comes back to it as it was: a position in the data, statistics.
    """

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scheduler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(self.extra.keys() & {"model", "optimizer", "scheduler"})
        if taken:
            raise UsageError(
                f"extra={{{taken[0]!r}: ...}} of Run(...) has the name under which something else is saved",
                fix="give it another name",
            )

    def collect(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return what is one value over all ranks, (possibly sharded) tensors and plain ones; and what is this rank's.

        The latter is pickled, by name.
        """
        state, own = self._main(), {}
        for name, part in self.extra.items():
            value = part.state_dict()
            if isinstance(part, torch.nn.Module) or _is_sharded(value):
                state[name] = value
            else:
                own[name] = per_rank.pack(value)
        return state, own

    @property
    def has_own(self) -> bool:
        """Return whether anything may be each rank's own."""
        return bool(self.extra)

    @property
    def updates(self) -> bool:
        """Return whether an optimizer says when it changes the weights."""
        return bool(self.optimizers)

    def late_pointers(self) -> frozenset[int]:
        """Return the data pointers of what only the optimizer's step changes: its parameters and its state."""
        found: set[int] = set()
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states = [value for state in optimizer.state.values() for value in state.values()]
            found |= {_pointer(value) for value in [*parameters, *states] if isinstance(value, torch.Tensor)}
        return frozenset(found)

    def template(self, own: Collection[str]) -> dict[str, Any]:
        """Return what is to be loaded into: all but the `own` ones, which need nothing to come back."""
        return {**self._main(), **{name: part.state_dict() for name, part in self.extra.items() if name not in own}}

    def apply(self, state: dict[str, Any]) -> None:
        """Put a loaded dictionary back."""
        if self.optimizers:
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        else:
            set_model_state_dict(self.model, state["model"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, part in self.extra.items():
            part.load_state_dict(state[name])

    def _main(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.optimizers:
            state["model"], state["optimizer"] = get_state_dict(self.model, self.optimizers)
        else:
            state["model"] = get_model_state_dict(self.model)
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return state


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who writes: goes into every manifest of this attempt."""

    run: RunDir
    attempt: int
    topology: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    config: str = ""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load leaves to do: random states to put back (None for a rank that did not exist then).

    `dealt` are the parts of `extra` that another number of ranks had, `saved_by`: rank r took what r % saved_by had.
    """

    random: dict[str, Any] | None
    dealt: tuple[str, ...] = ()
    saved_by: int = 0
    verified: frozenset[str] = frozenset()  # the files of which this rank has proven every byte


def load(state: State, folder: Path, manifest: mf.Manifest, group: Group) -> Loaded:
    """Load a checkpoint into the model and the rest, on every rank, every byte that is used proven.

    Another number of ranks than it was saved by is fine. Raises on every rank: DamagedFileError if a file is not what
    the manifest says, UsageError if it does not fit the model, StoreUnreadableError if a file cannot be read. What was
    loaded by then is overwritten by the next load.
    """
    reader, names = VerifiedReader(folder, manifest), []
    if state.extra:
        names = _on_all(reader, group, lambda: _entries_of(reader, state))
    mine = {name: key for name in state.extra if (key := per_rank.key_in(names, name, group.rank))}
    template = state.template(mine)
    _check_place(template, names, folder)
    template |= dict.fromkeys(mine.values(), b"")
    # each rank plans for itself, since DCP's collectives around it add nothing: what fails is told to all here
    _on_all(reader, group, lambda: dcp_load(template, storage_reader=reader, no_dist=True))
    random = _random(reader, group)
    own = {name: per_rank.unpack(template.pop(key)) for name, key in mine.items()}
    state.apply({**template, **own})
    savers = {name: len(per_rank.ranks_in(names, name)) for name in mine}
    dealt = tuple(name for name, count in savers.items() if count not in {0, group.world})
    return Loaded(
        random=random, dealt=dealt, saved_by=savers[dealt[0]] if dealt else 0, verified=frozenset(reader.verified)
    )


def _random(reader: VerifiedReader, group: Group) -> dict[str, Any] | None:
    """Return this rank's random states; what fails on one rank is raised on all."""
    data, damaged, unread = b"", "", ""
    try:
        data = reader.bytes_of(rng.file_name(group.rank)) or b""
    except DamagedFileError as error:
        damaged = error.what
    except OSError as error:
        unread = f"rank {group.rank}: {error}"
    for wrong, cause in group.gather((damaged, unread)):
        if wrong:
            raise DamagedFileError(wrong, where=str(reader.folder))
        if cause:
            raise _unreadable(reader.folder, cause)
    return json.loads(data) if data else None


def _on_all(reader: VerifiedReader, group: Group, action: Callable[[], T]) -> T:
    """Read on every rank; raise on all what went wrong on any, and tell a bad checkpoint from one that does not fit."""
    kind, what, value = "", "", None
    try:
        with quiet():
            value = action()
    except (CheckpointException, DamagedFileError, OSError) as error:
        kind, what = _fault(error)
    if group.most([int(bool(kind))])[0]:
        _raise(
            reader.folder,
            [(kind, f"rank {rank}: {what}") for rank, (kind, what) in enumerate(group.gather((kind, what)))],
        )
    return value  # type: ignore[return-value]  # None only where T is None


def _fault(error: CheckpointException | DamagedFileError | OSError) -> tuple[str, str]:
    """Return what kind of fault it is, and what to say of it."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for kind, types in (("damaged", DamagedFileError), ("unread", OSError)):
        found = next((cause for cause in causes if isinstance(cause, types)), None)
        if found is not None:
            return kind, found.what if isinstance(found, DamagedFileError) else str(found)
    return "misfit", "; ".join(dict.fromkeys(str(cause) for cause in causes))


def _raise(folder: Path, faults: list[tuple[str, str]]) -> NoReturn:
    told = {kind: what for kind, what in reversed(faults) if kind}
    if "damaged" in told:
        raise DamagedFileError(told["damaged"].partition(": ")[2], where=str(folder))
    if "unread" in told:
        raise _unreadable(folder, told["unread"])
    raise UsageError(
        f"this checkpoint does not fit the model, optimizer and scheduler of the script: {told['misfit']}",
        where=str(folder),
        fix="give a changed model a run directory of its own",
    )


def _unreadable(folder: Path, what: str) -> StoreUnreadableError:
    return StoreUnreadableError(
        f"the checkpoint cannot be read: {what}",
        where=str(folder),
        fix="see to it that the shared file system can be read on every node; the next attempt tries again",
    )


def _pointer(value: torch.Tensor) -> int:
    return (value.to_local() if isinstance(value, DTensor) else value).data_ptr()


def _is_sharded(value: Any) -> bool:
    """Return whether a state holds a tensor that is dealt out over ranks."""
    if isinstance(value, Mapping):
        return any(_is_sharded(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_is_sharded(part) for part in value)
    return isinstance(value, DTensor)


def _entries_of(reader: VerifiedReader, state: State) -> list[str]:
    """Return the names in a checkpoint of all that belongs to `extra`."""
    prefixes = (per_rank.PREFIX, *(f"{name}." for name in state.extra))
    return [key for key in reader.read_metadata().state_dict_metadata if key.startswith(prefixes)]


def _check_place(template: dict[str, Any], names: Iterable[str], folder: Path) -> None:
    """Raise UsageError if a value of `extra` has no place to be loaded into: DCP would leave it out silently."""
    places = flatten_state_dict(template)[0]
    left = [key for key in names if not key.startswith(per_rank.PREFIX) and key not in places]
    if left:
        raise UsageError(
            f"the checkpoint holds values of extra that its objects have no place for at the start: {left[0]}"
            + (f" and {len(left) - 1} more" if len(left) > 1 else ""),
            where=str(folder),
            fix="make the objects as they were when they were saved; give optimizers as optimizer=[...]",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence DCP's warnings that tell the user nothing."""
    # DCP warns that a single process is a single process, and of its own storage internals
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
