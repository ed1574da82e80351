"""Train a small model that each attempt may wrap in another way, on another number of ranks, with other batches.

Each rank writes what it holds, right after the restore and at the end: every tensor, whole, by its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
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
        return index, torch.sin(torch.arange(6.0) + index)


class Small(nn.Module):
    """Parameters that do not divide evenly, and some smaller than the number of ranks."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.norm = nn.LayerNorm(5)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2, 3))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y: torch.Tensor = self.down(self.norm(torch.tanh(self.up(x)))) * self.scale + self.shift.flatten()
        return y


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--die-at", type=int, help="the last rank kills itself in this step")
    parser.add_argument("--holds", type=Path, required=True, help="folder for what each rank holds")
    return parser.parse_args()


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups: what has one dimension does not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def held(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    state["scheduler"] = scheduler.state_dict()
    return {key: digest(value) for key, value in flatten_state_dict(state)[0].items()}


def digest(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    return repr(value)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(int(os.environ["PCTOOL_ATTEMPT"]))  # what is restored must not come from the same seed
    model = wrap(Small(), args.wrap)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    data = Numbers(args.length)
    sampler = ResumableSampler(args.length, seed=3)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=args.workers)
    run = Run(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, every=args.every)

    def write(when: str) -> None:
        path = args.holds / f"{run.attempt}-{when}-rank{rank}.json"
        path.write_text(json.dumps(held(model, optimizer, scheduler), indent=1))

    write("begin")
    for step, (ids, x) in run.steps(loader, until=args.steps):
        if rank == dist.get_world_size() - 1 and step == args.die_at:
            os.kill(os.getpid(), 9)
        loss = ((model(x) - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(step, loss=loss.item(), samples=ids.tolist())
        if step == args.steps or step % args.every == 0:
            write(f"step{step}")


if __name__ == "__main__":
    main()
