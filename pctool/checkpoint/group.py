"""Agreement between the ranks of a job about checkpoints: over gloo, never over the group that trains.

Collectives of the training group would queue behind the training's own, and gathering objects over NCCL takes device
memory. One rank's failure is told to all, so that no rank waits in a collective that another will never enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pctool.errors import IncompleteError, UsageError

T = TypeVar("T")

TIMEOUT_S = 1800.0  # one rank may write much longer than the others (a full OST, a slow node)


class RanksFailedError(IncompleteError):
    """Something failed on one rank at least, and every rank knows."""


class Group:
    """All ranks of the job, or this process alone where torch.distributed is not in use."""

    def __init__(self, *, world_size: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Join. `world_size` is what the launcher said: more than 1 without a process group raises UsageError."""
        self.process_group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.process_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        elif world_size > 1:
            raise UsageError(
                f"the launcher started {world_size} ranks, but torch.distributed is not initialised",
                fix="call torch.distributed.init_process_group() before Run(...)",
            )

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if self.process_group is None:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def most(self, values: Sequence[int]) -> list[int]:
        """Return the greatest of all ranks' values, place by place, on every rank."""
        if self.process_group is None:
            return list(values)
        box = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.process_group)
        return [int(value) for value in box.tolist()]

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on rank 0; [] on the others."""
        if self.process_group is None:
            return [value]
        values: list[T] | None = [value] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.process_group)
        return values or []

    def from_first(self, values: Sequence[T]) -> T:
        """Return this rank's of the values that rank 0 has for each."""
        if self.process_group is None:
            return values[0]
        box: list[T | None] = [None]
        dist.scatter_object_list(box, list(values) if self.rank == 0 else None, src=0, group=self.process_group)
        return box[0]  # type: ignore[return-value]  # None only where T is None

    def agree(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results.

        Raises RanksFailedError on every rank if it failed on any.
        """
        outcomes = self.gather(attempt(action))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]
        if failed:
            raise RanksFailedError(f"{what} failed on {'; '.join(failed)}")
        return [value for value, _ in outcomes if value is not None]

    def agree_on_own(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return this rank's result, which the others need not have.

        Raises RanksFailedError on every rank if it failed on any.
        """
        value, error = attempt(action)
        self.agree(what, lambda: _raise(error) if error else None)
        return value  # type: ignore[return-value]  # None only where T is None

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone and return its result, or raise its error, on every rank."""
        box: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.rank == 0:
            try:
                box[0] = (action(), None)
            except Exception as error:  # noqa: BLE001 - raised again below, on every rank
                box[0] = (None, error)
        if self.process_group is not None:
            dist.broadcast_object_list(box, src=0, group=self.process_group)
        value, failure = box[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # None only where T is None


def attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result, "") or (None, what went wrong)."""
    try:
        return action(), ""
    except CheckpointException as error:
        return None, "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    except Exception as error:  # noqa: BLE001 - told to every rank by the caller, which raises
        return None, f"{type(error).__name__}: {error}"


def _raise(why: str) -> None:
    raise IncompleteError(why)
