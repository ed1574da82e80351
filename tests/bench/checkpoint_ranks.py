"""One rank of tests/bench/checkpoint.py: `checkpoint_ranks.py PART FOLDER MIB PAIRS`, with torchrun's variables set.

Rank 0 writes what was measured to FOLDER/PART.json: seconds of the slowest rank, a list a row.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import drop, own, shared
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pctool.checkpoint import restore
from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.manifest import Manifest
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import store_key
from pctool.checkpoint.torch import Identity, Loaded, TrainState, load
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger

LAYERS, WIDTH = 16, 1024
SPLIT = (1, 1, 2, 2)  # of a layer's rows over its matrices, so that sizes differ as a transformer's do
CHUNK = 16 << 20
STORE = "s3://keep/store"
Measured = dict[str, float]


class Layers(torch.nn.Module):
    """Sharded matrices and replicated vectors, of `mib` MiB a rank together with AdamW's two moments."""

    def __init__(self, mib: int, world: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        unit = max(mib * 2**20 // (3 * LAYERS * sum(SPLIT) * WIDTH * 4), 1)
        for layer in range(LAYERS):
            for number, share in enumerate(SPLIT):
                local = torch.randn(share * unit, WIDTH)
                self._add(f"layer{layer}_weight{number}", DTensor.from_local(local, mesh, [Shard(0)]))
            self._add(f"layer{layer}_norm", DTensor.from_local(torch.ones(WIDTH), mesh, [Replicate()]))

    def _add(self, name: str, value: DTensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(value))


def make_state(mib: int, world: int) -> TrainState:
    """Return a model with an optimizer that has done a step."""
    model = Layers(mib, world)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model=model, optimizers=(optimizer,))


def local_tensors(state: TrainState) -> list[torch.Tensor]:
    """Return this rank's tensors."""
    found, queue = [], [state.collect()[0]]
    while queue:
        for value in queue.pop().values():
            if isinstance(value, dict):
                queue.append(value)
            elif isinstance(value, torch.Tensor):
                found.append(value.to_local() if isinstance(value, DTensor) else value)
    return found


class Rank:
    """What the parts share."""

    def __init__(self, folder: Path, mib: int, pairs: int) -> None:
        self.group = Group()
        self.folder, self.pairs = folder, pairs
        self.run = RunDir(folder / f"run-{self.group.world}")
        self.state = make_state(mib, self.group.world)
        self.tensors = local_tensors(self.state)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self.step = 0
        self.run.attempt(0).path.mkdir(parents=True, exist_ok=True)
        self.engine = Engine(Setup(identity=Identity(run=self.run, attempt=0)), self.group, say=lambda text: None)

    def clock(self, *actions: Callable[[], Any]) -> list[float]:
        """Do the actions, one after the other, from a common start; return the slowest rank's times until each ends."""
        dist.barrier()
        began, ends = time.perf_counter(), []
        for action in actions:
            action()
            ends.append(time.perf_counter() - began)
        return [int(value) / 1e9 for value in self.group.most([int(end * 1e9) for end in ends])]

    def save(self, *, forget: bool = True) -> Measured:
        """Save with the engine; the checkpoint before is removed first, outside of the time."""
        if forget:
            self.clear(self.run.checkpoints)
        self.step += 1
        begin = lambda: self.engine.save(self.state, self.step, parent=None, position={})  # noqa: E731
        stall, durable = self.clock(begin, self.settle)
        return {"ours: stall": stall, "ours: durable": durable}

    def settle(self) -> None:
        """Wait until the checkpoint is complete."""
        result = self.engine.settle()
        assert result is not None
        assert result.ok, result.why

    def clear(self, folder: Path) -> None:
        """Empty a folder, on rank 0."""
        dist.barrier()
        if self.group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()

    def turns(self, *rows: Callable[[], Measured]) -> dict[str, list[float]]:
        """Measure all rows in turn, every other time backwards, after a warm-up."""
        for row in rows:
            row()
        found: dict[str, list[float]] = {}
        for turn in range(self.pairs):
            for row in rows if turn % 2 == 0 else rows[::-1]:
                for name, value in row().items():
                    found.setdefault(name, []).append(value)
        return found


class Saves:
    """The ways to save, each measured by a method."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.folder = rank, rank.folder / "others"
        self.path = self.folder / f"rank-{rank.group.rank}"
        size = -(-rank.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        whole, at, self.places = torch.frombuffer(self.memory, dtype=torch.uint8), 0, []
        for tensor in sorted(rank.tensors, key=lambda tensor: -tensor.element_size() * tensor.numel()):
            end = at + tensor.numel() * tensor.element_size()
            self.places.append((whole[at:end].view(tensor.dtype).view(tensor.shape), tensor))
            at = end
        kinds = KINDS if rank.pairs >= FULL else KINDS[:1]  # the other's process takes seconds to start
        self.stagers = {kind: DefaultStager(StagingOptions(False, kind == "process", False, False)) for kind in kinds}

    def rows(self) -> list[Callable[[], Measured]]:
        """Return all, those that are compared side by side."""
        waited = [partial(self.dcp_async, kind) for kind in self.stagers]
        return [self.memcpy, self.rank.save, self.raw, self.direct, self.torch_save, self.dcp_save, *waited]

    def memcpy(self) -> Measured:
        return {"memcpy": self.rank.clock(self._copy)[0]}

    def raw(self) -> Measured:
        return self._written("raw write + fsync", lambda: self._write(0))

    def direct(self) -> Measured:
        return self._written("raw write + fsync, O_DIRECT", lambda: self._write(os.O_DIRECT))

    def torch_save(self) -> Measured:
        def save() -> None:
            with self.path.open("wb") as file:
                torch.save(self.rank.tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return self._written("torch.save + fsync", save)

    def dcp_save(self) -> Measured:
        return self._written("dcp.save", lambda: dcp_save(self.rank.state.collect()[0], **self._options()))

    def dcp_async(self, kind: str) -> Measured:
        """Save with DCP's async_save as its documents have it fastest: a kept stager, a kept plan."""
        waiting: list[Any] = []
        kinds = AsyncCheckpointerType[kind.upper()]
        options = {**self._options(), "async_stager": self.stagers[kind], "async_checkpointer_type": kinds}
        begin = lambda: waiting.append(dcp_async_save(self.rank.state.collect()[0], **options))  # noqa: E731
        self.rank.clear(self.folder)
        stall, durable = self.rank.clock(begin, lambda: waiting[0].result())
        return {f"dcp.async_save ({kind}): stall": stall, f"dcp.async_save ({kind}): durable": durable}

    def _written(self, name: str, action: Callable[[], Any]) -> Measured:
        self.rank.clear(self.folder)
        return {name: self.rank.clock(action)[0]}

    def _options(self) -> dict[str, Any]:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        return {"storage_writer": FileSystemWriter(self.folder / "dcp"), "planner": planner}

    def _copy(self) -> None:
        with torch.no_grad():
            for place, tensor in self.places:
                place.copy_(tensor)

    def _write(self, flags: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
        with memoryview(self.memory) as view:
            at = 0
            while at < len(view):
                at += os.write(fd, view[at : at + 2 * CHUNK])
        os.fsync(fd)
        os.close(fd)


KINDS = ("thread", "process")
FULL = 3  # turns from which on all is measured


class Restores:
    """The ways to read a checkpoint, from the file system (cold: dropped from the page cache first) and from S3."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.buffer = rank, bytearray(CHUNK)
        self.ledger = Ledger(rank.run.ledger)
        rank.save()
        self.checkpoint = next(rank.run.checkpoints.glob("0*"))

    def rows(self) -> list[Callable[[], Measured]]:
        """Return those of the file system."""
        return [partial(self._measured, way, cold) for cold in (True, False) for way in WAYS]

    def from_s3(self) -> Measured:
        """Restore where the file system has nothing."""
        self.rank.clear(self.rank.run.checkpoints)
        return {"ours: restore from S3": self.rank.clock(lambda: self.restore(STORE))[0]}

    def download(self) -> Measured:
        """Download the same files, each rank its share."""
        self.rank.clear(self.rank.folder / "others")
        return {"boto3 download": self.rank.clock(self._download)[0]}

    def to_s3(self) -> None:
        """Bring the checkpoint to S3, and know that what comes back is what was saved."""
        run = self.rank.run
        if self.rank.group.rank == 0:
            assert Mirror(run, S3Store(STORE, store_key(run)), 0).poke()
        saved = [tensor.clone() for tensor in self.rank.tensors]
        for tensor in self.rank.tensors:
            tensor.detach().zero_()
        self.from_s3()
        assert all(map(torch.equal, saved, self.rank.tensors))

    def restore(self, store: str | None = None) -> None:
        def take(folder: Path, manifest: Manifest, /) -> tuple[Loaded, frozenset[str]]:
            loaded = load(self.rank.state, folder, manifest, self.rank.group)
            return loaded, loaded.verified

        whole = restore.find_whole(self.rank.run, store, self.rank.group, self.ledger, 0, take)
        assert whole is not None

    def raw(self) -> None:
        for path in self._mine():
            with path.open("rb", buffering=0) as file:
                while file.readinto(self.buffer):
                    pass

    def dcp_load(self) -> None:
        dcp_load(self.rank.state.collect()[0], storage_reader=FileSystemReader(self.checkpoint))

    def _measured(self, way: str, cold: bool) -> Measured:
        if self.rank.group.rank == 0 and cold:
            drop(self.checkpoint)
        action = {"raw read": self.raw, "ours: restore": self.restore, "dcp.load": self.dcp_load}[way]
        return {f"{way}, {'cold' if cold else 'warm'}": self.rank.clock(action)[0]}

    def _download(self) -> None:
        import boto3

        client: Any = boto3.session.Session().client("s3")
        for path in self._mine():
            key = f"store/{self.rank.run.path.name}/checkpoints/{path.parent.name}/{path.name}"
            client.download_file("keep", key, str(self.rank.folder / "others" / path.name))

    def _mine(self) -> Sequence[Path]:
        rank = self.rank.group.rank
        return [self.checkpoint / f"__{rank}_0.distcp", *([self.checkpoint / ".metadata"] if rank == 0 else [])]


WAYS = ("raw read", "ours: restore", "dcp.load")


def memory(rank: Rank, *rows: Callable[[], Measured]) -> dict[str, Any]:
    """Do the rows twice while the parent watches; return the memory before, and between which times it did."""
    dist.barrier()
    before, began = sum(rank.group.gather(own(os.getpid()) + shared(os.getpid()))), time.monotonic()
    first = {name: value for row in rows for name, value in row().items()}
    for row in rows:
        row()
    dist.barrier()
    return {"before": before, "began": began, "ended": time.monotonic(), "first": first}


def measure_saves(rank: Rank) -> dict[str, Any]:
    """Measure memory first, while nothing else has taken any; then all that moves data."""
    watched = {"ours": memory(rank, rank.save)}
    saves = Saves(rank)
    watched["dcp.async_save (thread)"] = memory(rank, lambda: saves.dcp_async("thread"))
    if rank.group.rank == 0:
        (rank.folder / "watched").touch()
    found = rank.turns(*saves.rows())
    restores = Restores(rank)
    found |= rank.turns(*restores.rows())
    restores.to_s3()
    found |= rank.turns(restores.from_s3, restores.download)
    return {"times": found, "memory": watched, "bytes": sum(rank.group.gather(rank.bytes))}


def measure_training(rank: Rank) -> dict[str, Any]:
    """Measure steps a second while a save goes on behind, and for as long without."""
    square = torch.randn(256, 256)

    def train(on: Callable[[], bool]) -> tuple[float, float]:
        steps, began = 0, time.perf_counter()
        while steps == 0 or on():
            torch.mm(square, square)
            steps += 1
        seconds = time.perf_counter() - began
        return steps / seconds, seconds

    def flying() -> bool:
        rank.engine.settle(0.0)
        return rank.engine.in_flight is not None

    def turn() -> Measured:
        rank.clear(rank.run.checkpoints)
        rank.step += 1
        rank.engine.save(rank.state, rank.step, parent=None, position={})
        behind, seconds = train(flying)
        end = time.perf_counter() + seconds
        alone, _ = train(lambda: time.perf_counter() < end)
        return {"train, a save behind": behind, "train": alone}

    return {"times": rank.turns(turn)}


def main(part: str, folder: Path, mib: int, pairs: int) -> None:
    """Measure one part."""
    warnings.simplefilter("ignore")  # torch's, of its own internals
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(folder, mib, pairs)
    answer = (measure_training if part == "training" else measure_saves)(rank)
    rank.engine.close()
    if rank.group.rank == 0:
        (folder / f"{part}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
