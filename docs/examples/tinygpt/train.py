"""Train a small byte-level GPT on the sources of Python's own standard library.

Runs alone (`python train.py`), under torchrun, and as a pctool job. The lines that end in `# pctool` are all that
differs from the plain script: one import, the sampler in place of DistributedSampler, the run, its loop, its log.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from pctool.train import ResumableSampler, Run  # pctool

CONTEXT = 64  # bytes a sample
Sample = tuple[int, torch.Tensor, torch.Tensor]


class Sources(Dataset[Sample]):
    """The top-level modules of the standard library, cut into samples of CONTEXT bytes."""

    def __init__(self) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Sample:
        piece = self.data[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return index, piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A GPT over bytes."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    model: nn.Module = TinyGPT().to(device)
    if dist.is_initialized():
        # DDP lays its gradient buckets anew after the first step of each start, and so adds in another order than a
        # run without a restart would. With find_unused_parameters they stay, and resuming is exact to the bit.
        model = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(1 + rank)  # each rank drops out other units
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    dataset = Sources()
    sampler = ResumableSampler(len(dataset), seed=0)  # pctool
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2)

    run = Run(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, every=args.every)  # pctool
    for step, (ids, x, y) in run.steps(loader, until=args.steps):  # pctool
        logits = model(x.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(step, loss=loss.item(), samples=ids.tolist())  # pctool
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
