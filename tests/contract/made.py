"""Real checkpoints for tests: DCP's own files, several shards of one size each, and a run's ledger."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.stores import PosixStore
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

FIRST, NEWEST = checkpoint_name(0, 10), checkpoint_name(0, 20)
SHARDS = ("__0_0.distcp", "__0_1.distcp")  # of one size: two tensors of one shape


def make_run(path: Path, *steps: int) -> RunDir:
    """Make a run with a checkpoint of attempt 0 at each step, one the parent of the next."""
    run = RunDir(path)
    run.attempt(0).path.mkdir(parents=True)
    parent = None
    for step in steps or (10, 20):
        parent = add_checkpoint(run, step, parent=parent)
    return run


def add_checkpoint(run: RunDir, step: int, *, attempt: int = 0, parent: str | None = None) -> str:
    """Save one more, and say so in the ledger."""
    name = checkpoint_name(attempt, step)
    folder = run.checkpoints / name
    state = {"model": {"a": torch.full((8, 4), float(step)), "b": torch.full((8, 4), step + 0.5)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
    files = {file.name: mf.describe_file(file) for file in folder.iterdir()}
    assert len({files[shard].size for shard in SHARDS}) == 1
    manifest = mf.Manifest(
        run=str(run.path),
        attempt=attempt,
        step=step,
        parent=parent,
        world_size=2,
        files=files,
        position={"step": step, "epoch": 0},
        time=1000.0,
    )
    PosixStore(run.checkpoints).publish(name, mf.encode(manifest))
    fields = {"name": name, "step": step, "parent": parent, "bytes": manifest.bytes, "tier": "posix"}
    Ledger(run.ledger).append("committed", attempt=attempt, **fields)
    return name


def flip(data: bytes) -> bytes:
    """Return the bytes with one bit in the middle turned."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
