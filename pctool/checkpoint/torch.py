"""Save and load a training job's state in torch.distributed.checkpoint's own files.

Any DCP reader loads them (`dcp.load`, `dcp_to_torch_save`); MANIFEST and the ranks' random states lie beside them.
The order of calls for one checkpoint, on every rank: `write`, then `commit` on rank 0 alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import own as per_rank
from pctool.checkpoint import rng
from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.group import Group
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import IncompleteError, UsageError
from pctool.run.layout import RunDir, checkpoint_name, fsync_dir

METADATA = ".metadata"  # DCP's index, written by its coordinator


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
class Written:
    """Data files that are durable on the shared file system, and not yet a checkpoint."""

    name: str
    step: int
    files: Mapping[str, mf.FileEntry]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who writes: goes into every manifest of this attempt."""

    run: RunDir
    attempt: int
    topology: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    config: str = ""


def write(state: TrainState, step: int, identity: Identity, group: Group) -> Written:
    """Write all data files of one checkpoint, on every rank; return once all of them are durable.

    Raises RanksFailedError on every rank if anything failed on one: nothing is published then, and what lies in the
    folder is cleared by the next save of that name.
    """
    name = checkpoint_name(identity.attempt, step)
    folder = identity.run.checkpoints / name
    group.first(lambda: _clear(identity.run, name))
    collected: list[tuple[dict[str, Any], dict[str, bytes]]] = []

    def collect() -> dict[str, str]:
        collected.append(state.collect())
        return {part: hashlib.sha256(data).hexdigest() for part, data in collected[0][1].items()}

    digests = group.agree("collecting the state", collect)
    shared, own = collected[0]
    entries = {**shared, **per_rank.entries(own, digests, group.rank)}
    written = group.agree("writing the checkpoint", lambda: _write_mine(entries, folder, group))
    return Written(name=name, step=step, files={file: entry for mine in written for file, entry in mine.items()})


def commit(written: Written, identity: Identity, *, parent: str | None, position: Mapping[str, Any]) -> mf.Manifest:
    """Make a checkpoint of the written files: check the fence, write MANIFEST. Rank 0 alone calls this.

    Raises FencedError if a newer attempt exists, IncompleteError if a file is not there as it was written, OSError.
    """
    check_fence(identity.run, identity.attempt)
    manifest = mf.Manifest(
        run=str(identity.run.path.absolute()),
        attempt=identity.attempt,
        step=written.step,
        parent=parent,
        world_size=int(identity.topology.get("world_size", 1)),
        files=written.files,
        topology=identity.topology,
        position=position,
        time=round(time.time(), 3),
        code=identity.code,
        config=identity.config,
    )
    folder = identity.run.checkpoints / written.name
    data = mf.encode(manifest)
    verdict = mf.judge(data, mf.folder_sizes(folder))
    if not verdict.ok:
        raise IncompleteError(verdict.why, where=str(folder))
    PosixStore(identity.run.checkpoints).publish(written.name, data)
    return manifest


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load leaves to do: random states to put back (None for a rank that did not exist then).

    `dealt` are the parts of `extra` that another number of ranks had, `saved_by`: rank r took what r % saved_by had.
    """

    random: dict[str, Any] | None
    dealt: tuple[str, ...] = ()
    saved_by: int = 0


def load(state: TrainState, folder: Path, group: Group) -> Loaded:
    """Load a checkpoint into the model and the rest, on every rank.

    Another number of ranks than it was saved by is fine. Raises UsageError if it does not fit the model,
    StoreUnreadableError if a file of it cannot be read.
    """
    reader, names = FileSystemReader(folder), []
    if state.extra:
        with _reading(folder, group):
            names = group.first(lambda: _entries_of(reader, state))
    mine = {name: key for name in state.extra if (key := per_rank.key_in(names, name, group.rank))}
    template = state.template(mine)
    _check_place(template, names, folder)
    template |= dict.fromkeys(mine.values(), b"")
    with _reading(folder, group), quiet():
        dcp_load(
            template,
            storage_reader=reader,
            process_group=group.process_group,
            no_dist=group.process_group is None,
        )
        random = rng.read(folder, group.rank)
    own = {name: per_rank.unpack(template.pop(key)) for name, key in mine.items()}
    state.apply({**template, **own})
    savers = {name: len(per_rank.ranks_in(names, name)) for name in mine}
    dealt = tuple(name for name, count in savers.items() if count not in {0, group.world})
    return Loaded(random=random, dealt=dealt, saved_by=savers[dealt[0]] if dealt else 0)


@contextmanager
def _reading(folder: Path, group: Group) -> Iterator[None]:
    """Tell a checkpoint that cannot be read from one that does not fit, whichever rank it happens on."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        unread = next((rank for rank, cause in causes.items() if isinstance(cause, OSError)), None)
        if unread is not None:
            raise _unreadable(folder, f"rank {unread}: {causes[unread]}") from error
        raise UsageError(
            "this checkpoint does not fit the model, optimizer and scheduler of the script: "
            + "; ".join(dict.fromkeys(str(cause) for cause in causes.values())),
            where=str(folder),
            fix="give a changed model a run directory of its own",
        ) from error
    except OSError as error:
        raise _unreadable(folder, f"rank {group.rank}: {error}") from error


def _unreadable(folder: Path, what: str) -> StoreUnreadableError:
    return StoreUnreadableError(
        f"the checkpoint cannot be read: {what}",
        where=str(folder),
        fix="see to it that the shared file system can be read on every node; the next attempt tries again",
    )


def _is_sharded(value: Any) -> bool:
    """Return whether a state holds a tensor that is dealt out over ranks."""
    if isinstance(value, Mapping):
        return any(_is_sharded(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_is_sharded(part) for part in value)
    return isinstance(value, DTensor)


def _entries_of(reader: FileSystemReader, state: TrainState) -> list[str]:
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


def _clear(run: RunDir, name: str) -> None:
    store = PosixStore(run.checkpoints)
    store.remove(name)
    (run.checkpoints / name).mkdir(parents=True)
    fsync_dir(run.checkpoints)


def _write_mine(state: dict[str, Any], folder: Path, group: Group) -> dict[str, mf.FileEntry]:
    with quiet():
        dcp_save(
            state,
            storage_writer=FileSystemWriter(folder, sync_files=True),
            process_group=group.process_group,
            no_dist=group.process_group is None,
        )
    _write_durably(folder / rng.file_name(group.rank), json.dumps(rng.capture()).encode())
    fsync_dir(folder)
    return {file: mf.describe_file(folder / file) for file in _files_of(folder, group.rank)}


def _files_of(folder: Path, rank: int) -> list[str]:
    """Return the files that DCP and we wrote on this rank; DCP's coordinator, rank 0, also wrote the index."""
    mine = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_")]
    return sorted([*mine, rng.file_name(rank), *([METADATA] if rank == 0 else [])])


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence DCP's warnings that tell the user nothing."""
    # DCP warns that a single process is a single process, and of its own storage internals
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
