"""What the ranks of these tests run: a training whose whole state follows from the step and the rank."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pctool.train import Run

_FIELDS = 4
_RESTORED, _BEGUN, _DONE = range(3)


class Progress:
    """Numbers of one rank in a file that is mapped, so that they outlive a kill: -1 where there is none yet."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(struct.pack(f"={_FIELDS}q", *[-1] * _FIELDS))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * _FIELDS)

    def put(self, place: int, value: int) -> None:
        """Set one number."""
        struct.pack_into("=q", self._map, 8 * place, value)

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("=q", self._map, 8 * place)[0])

    @property
    def restored(self) -> int:
        """Return the step that was restored and found equal, bit by bit; 0 for a new start."""
        return self._get(_RESTORED)

    @property
    def begun(self) -> int:
        """Return the last step whose body was entered: this rank has handed the save of the one before over."""
        return self._get(_BEGUN)

    @property
    def done(self) -> int:
        """Return the last step whose body was left: no save of a later one can have begun."""
        return self._get(_DONE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank is told. `environ` is that of a rank under torchrun."""

    environ: dict[str, str]
    log: Path
    progress: Path
    kib: int = 2048  # of the model
    until: int = 1_000_000
    every: int = 1
    keep: int | None = 3
    step_s: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


def fill(tensor: torch.Tensor, *numbers: int) -> None:
    """Fill a float32 tensor with bits that follow from the numbers alone; many of them are no ordinary numbers."""
    salt = 0
    for number in numbers:
        salt = (salt * 1_000_003 + number) % 2**31
    bits = torch.arange(tensor.numel(), dtype=torch.int64) * 2_654_435_761 + salt * 40_503
    tensor.detach().view(torch.int32).copy_(bits.to(torch.int32).view(tensor.shape))


def is_filled(tensor: torch.Tensor, *numbers: int) -> bool:
    """Return whether a tensor has exactly these bits."""
    wanted = torch.empty_like(tensor)
    fill(wanted, *numbers)
    return torch.equal(tensor.detach().view(torch.int32), wanted.view(torch.int32))


class Known(torch.nn.Module):
    """Eight parameters whose bits follow from the step."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.empty(kib * 32) for _ in range(8))

    def set(self, step: int) -> None:
        """Become the model after `step`."""
        for place, part in enumerate(self.parts):
            fill(part, step, place)

    def differing(self, step: int) -> list[int]:
        """Return which parameters are not those after `step`."""
        return [place for place, part in enumerate(self.parts) if not is_filled(part, step, place)]


class Own:
    """State of one rank alone, of another length at each step where `grows`."""

    def __init__(self, rank: int, *, grows: bool = False) -> None:
        self.rank, self.step, self.bits, self._grows = rank, 0, torch.empty(1000), grows

    def set(self, step: int) -> None:
        """Become the state after `step`."""
        self.step = step
        fill(self.bits, step, 100 + self.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        more = {"seen": "x" * self.step} if self._grows else {}
        return {"step": self.step, "rank": self.rank, "bits": self.bits.clone(), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.step, self.rank, self.bits = state["step"], state["rank"], state["bits"]


class Sharded:
    """A tensor that is dealt out over all ranks."""

    def __init__(self, kib: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.whole = torch.empty(dist.get_world_size() * 8, kib * 4)
        self.tensor = distribute_tensor(torch.zeros_like(self.whole), mesh, [Shard(0)])

    def set(self, step: int) -> None:
        """Become the tensor after `step`."""
        fill(self.whole, step, 50)
        local = self.tensor.to_local()
        rows = local.shape[0]
        local.copy_(self.whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows])

    def equals(self, step: int) -> bool:
        """Return whether this rank's part is that after `step`."""
        mine = self.tensor.to_local().clone()
        self.set(step)
        return torch.equal(mine.view(torch.int32), self.tensor.to_local().view(torch.int32))

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.tensor = state["tensor"]


def train(job: Job) -> None:
    """Restore, compare every bit, and train with a save behind each step."""
    rank, progress = dist.get_rank(), Progress(job.progress)
    model, own, sharded = Known(job.kib), Own(rank, grows=bool(job.options.get("grows"))), Sharded(job.kib)
    run = Run(model=model, extra={"own": own, "sharded": sharded}, every=job.every, keep=job.keep)
    if run.step:
        assert not model.differing(run.step), f"step {run.step}: parameters {model.differing(run.step)}"
        assert (own.step, own.rank) == (run.step, rank), (own.step, own.rank, run.step)
        assert is_filled(own.bits, run.step, 100 + rank)
        assert sharded.equals(run.step)
    progress.put(_RESTORED, run.step)
    for step, _ in run.steps(range(1_000_000), until=job.until):
        progress.put(_BEGUN, step)
        model.set(step)
        own.set(step)
        sharded.set(step)
        if job.step_s:
            import time

            time.sleep(job.step_s)
        progress.put(_DONE, step)


def main(job: Job, body: Callable[[Job], None]) -> None:
    """Be one rank: the entry of a process."""
    os.environ.update(job.environ)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    code = 1
    try:
        dist.init_process_group("gloo")
        body(job)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - printed; the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as after a loss: no destructor of torch may wait for a rank that is gone
