"""A small deterministic training script for the tests: every switch a test needs is a flag."""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pctool.train import ResumableSampler, Run


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Samples made from their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, torch.sin(torch.arange(8.0) + index)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--keep", type=int)
    parser.add_argument("--length", type=int, default=101)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself in this step")
    parser.add_argument("--raise-at", type=int, help="rank 1 raises in this step")
    parser.add_argument("--fail-save-at", type=int, help="rank 1 cannot collect its state after this step")
    parser.add_argument("--fail-saves", action="store_true", help="rank 1 can never collect its state")
    parser.add_argument("--fail-file-at", type=int, help="rank 1's file cannot be written after this step")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--drift", action="store_true", help="no collective in a step; rank 1 is slower")
    return parser.parse_args()


def build(args: argparse.Namespace, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
    if args.fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif dist.is_initialized() and not args.drift:
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    return model


class Seen:
    """State of one rank alone: the samples that it has seen."""

    def __init__(self) -> None:
        self.samples: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"samples": dict(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Breaks(nn.Module):
    """State that cannot be collected, or not be written, after a given step, on rank 1.

    As a module, so that it goes the way of tensors, in the files that all ranks write together.
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        super().__init__()
        self.always, self.collect_at, self.write_at = args.fail_saves, args.fail_save_at, args.fail_file_at
        self.step, self.rank = 0, rank

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        if self.rank == 1 and (self.always or self.step == self.collect_at):
            raise OSError(28, "No space left on device")
        if self.rank == 1 and self.step == self.write_at:
            return {f"only on rank {self.rank}": Unwritable()}
        return {"step": 0}

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        pass


class Unwritable:
    """An object that fails while it is written."""

    def __reduce__(self) -> str:
        raise OSError(28, "No space left on device")


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = build(args, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    sampler = ResumableSampler(args.length, seed=3)
    loader = DataLoader(Numbers(args.length), args.batch_size, sampler=sampler, num_workers=args.workers)
    breaks, seen = Breaks(args, rank), Seen()
    run = Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        every=args.every,
        keep=args.keep,
        extra={"breaks": breaks, "seen": seen},
    )
    steps = run.steps(loader, until=args.steps)  # a name, which an exception keeps with its traceback
    for step, (ids, x) in steps:
        if rank == 1 and step == args.die_at:
            os.kill(os.getpid(), 9)
        if rank == 1 and step == args.raise_at:
            raise RuntimeError("told to raise")
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(args.step_s * (3 if args.drift and rank == 1 else 1))
        breaks.step = step
        seen.samples |= {str(sample): step for sample in ids.tolist()}
        run.log(step, loss=loss.item(), samples=ids.tolist(), dice=random.random(), seen=sum(seen.samples.values()))
    print(f"rank {rank} reached the end", flush=True)


if __name__ == "__main__":
    main()
