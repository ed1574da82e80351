"""A sampler whose position is one number that holds for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from pctool.errors import UsageError


class ResumableSampler(Sampler[int]):
    """Deal a data set out to the ranks as one endless stream: epoch after epoch, each shuffled anew from `seed`.

    Global batch k is the next `world_size * batch_size` samples of the stream, dealt to the ranks in turn. The
    position is the number of samples that all ranks together have trained on, so a run goes on with another number of
    ranks, and each sample still comes up exactly once an epoch. A batch may hold the end of one epoch and the start
    of the next; none is ever short. Being endless, it is meant for `Run.steps`, which knows where to end.

    `rank` and `world_size` are those of the data-parallel dimension; by default those of torch.distributed.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError("the data set is empty", fix="check the path the data set is read from")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        joined = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else (dist.get_rank() if joined else 0)
        self.world_size = world_size if world_size is not None else (dist.get_world_size() if joined else 1)
        self.position = 0  # samples trained on by all ranks together, since step 0

    @property
    def epoch(self) -> int:
        """Return the epoch the next sample belongs to, from 0."""
        return self.position // self.length

    def __len__(self) -> int:
        """Return how many samples an epoch has for one rank, rounded up."""
        return -(-self.length // self.world_size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the present position on, without end."""
        epoch, order = -1, torch.empty(0)
        index = self.position + self.rank
        while True:
            if index // self.length != epoch:
                epoch = index // self.length
                order = self._order(epoch)
            yield int(order[index % self.length])
            index += self.world_size

    def advance(self, batch_size: int) -> None:
        """Count one batch on every rank as trained on."""
        self.position += batch_size * self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is meaningful for."""
        return {"position": self.position, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position up. Raise UsageError if it belongs to another order of samples."""
        mine = {**self.state_dict(), "position": state.get("position")}
        if mine != state:
            changed = sorted(key for key in mine if mine[key] != state.get(key))
            raise UsageError(
                "the checkpoint's sample position does not fit this sampler: "
                + ", ".join(f"{key} was {state.get(key)!r}, is {mine[key]!r}" for key in changed),
                fix="keep the data set, seed and shuffle of a run as they were, or start a new run directory",
            )
        self.position = int(state["position"])

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed * 1_000_003 + epoch)  # any injective mix of the two will do
        return torch.randperm(self.length, generator=generator)
