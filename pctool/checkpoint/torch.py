"""Save and load a training job's state in torch.distributed.checkpoint's own files.

Any DCP reader loads them (`dcp.load`, `dcp_to_torch_save`); MANIFEST and the ranks' random states lie beside them.
The order of calls for one checkpoint, on every rank: `write`, then `commit` on rank 0 alone.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import rng
from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.group import Group
from pctool.checkpoint.stores import PosixStore
from pctool.errors import IncompleteError, UsageError
from pctool.run.layout import RunDir, checkpoint_name, fsync_dir

METADATA = ".metadata"  # DCP's index, written by its coordinator


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What is saved: the model, its optimizers, a scheduler, and anything else with state_dict/load_state_dict."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scheduler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def collect(self) -> dict[str, Any]:
        """Return the state as one dictionary of (possibly sharded) tensors and plain values."""
        state: dict[str, Any] = {}
        if self.optimizers:
            state["model"], state["optimizer"] = get_state_dict(self.model, self.optimizers)
        else:
            state["model"] = get_model_state_dict(self.model)
        return {**state, **{key: part.state_dict() for key, part in self._parts()}}

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
        for key, part in self._parts():
            part.load_state_dict(state[key])

    def _parts(self) -> Iterator[tuple[str, Any]]:
        if self.scheduler is not None:
            yield "scheduler", self.scheduler
        yield from self.extra.items()


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
    collected: list[dict[str, Any]] = []
    group.agree("collecting the state", lambda: collected.append(state.collect()))
    entries = group.agree("writing the checkpoint", lambda: _write_mine(collected[0], folder, group))
    return Written(name=name, step=step, files={file: entry for mine in entries for file, entry in mine.items()})


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


def load(state: TrainState, folder: Path, group: Group) -> None:
    """Load a checkpoint into the model and the rest, on every rank.

    Another number of ranks than it was saved by is fine. Raises UsageError if it does not fit the model.
    """
    template = state.collect()
    try:
        with quiet():
            dcp_load(
                template,
                storage_reader=FileSystemReader(folder),
                process_group=group.process_group,
                no_dist=group.process_group is None,
            )
    except CheckpointException as error:
        said = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
        raise UsageError(
            f"this checkpoint does not fit the model, optimizer and scheduler of the script: {said}",
            where=str(folder),
            fix="give a changed model a run directory of its own",
        ) from error
    state.apply(template)


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
