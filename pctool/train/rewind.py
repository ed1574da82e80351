"""Have a loader's epochs begin alike at every start, and the first one where the run stands.

As `loading.endless` does for pctool's own loop, for loops that call `iter(loader)` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pctool.checkpoint import rng
from pctool.errors import UsageError


@dataclass
class Rewind:
    """Where an epoch begins. `epoch` says which one it is; `skip` batches of the next one begun are done already.

    An epoch's random states (its order, its workers' seeds) follow from `seed` and the epoch alone.
    """

    epoch: Callable[[], int]
    seed: int = field(default_factory=rng.draw_seed)
    skip: int = 0
    own: list[tuple[torch.Generator, int]] = field(default_factory=list)  # the loader's, with their first seeds

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Have the random states be those in which the present epoch begins, and leave the global ones as they were."""
        epoch = self.epoch()
        for generator, seed in self.own:
            generator.manual_seed(rng.mix(seed, epoch))
        with rng.seeded(rng.mix(self.seed, epoch)):
            yield

    def take_skip(self) -> int:
        """Return how many batches to pass over, once."""
        skip, self.skip = self.skip, 0
        return skip


class _Behind:
    """The indices of an epoch behind those that are done."""

    def __init__(self, indices: Any, rewind: Rewind) -> None:
        self._indices, self._rewind = indices, rewind

    def __iter__(self) -> Iterator[Any]:
        return islice(self._indices, self._rewind.take_skip(), None)

    def __len__(self) -> int:
        return len(self._indices)


def is_stateful(loader: Any) -> bool:
    """Return whether a loader has a state of its own to say where it stands."""
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return has_state and not hasattr(loader, "pctool_rewind")


def rewindable(loader: Iterable[Any], rewind: Rewind) -> None:
    """Change one loader, in place, into one whose epochs begin as `rewind` says; it stays what it was otherwise.

    Raises UsageError for one that cannot be changed.
    """
    kind: Any = type(loader)
    changed: Any = loader
    if not hasattr(loader, "pctool_rewind"):
        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        try:
            changed.__class__ = _passing_indices(_beginning_alike(kind)) if indexed else _beginning_alike(kind)
        except TypeError as error:
            raise UsageError(
                f"a {kind.__name__} as train data loader cannot be begun where the run stands",
                fix="give a torch.utils.data.DataLoader",
            ) from error
    changed.pctool_rewind = rewind
    own = (getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None)))
    generators = {id(one): one for one in own if isinstance(one, torch.Generator)}
    rewind.own = [(one, one.initial_seed()) for one in generators.values()]


def _beginning_alike(kind: Any) -> Any:
    """Return a loader's class with epochs that begin as its rewind says."""

    def iterate(self: Any) -> Iterator[Any]:
        # a generator: nothing is started before the first batch is asked for, and by then all is restored
        rewind: Rewind = self.pctool_rewind
        with rewind.seeded():
            batches = iter(kind.__iter__(self))
            # here, since samplers draw when they are asked for their first index
            first = list(islice(batches, 1))
            left = rewind.take_skip()
            if left:
                first = list(islice(batches, left - 1, left))
        yield from first
        yield from batches

    # the loop knows the place; that there is a state tells it that this loader can go on
    state = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__, **state})


def _passing_indices(kind: Any) -> Any:
    """Return a DataLoader's class that passes over what is done without loading it."""

    def index_sampler(self: Any) -> _Behind:
        return _Behind(kind._index_sampler.fget(self), self.pctool_rewind)

    return type(kind.__name__, (kind,), {"_index_sampler": property(index_sampler), "__module__": kind.__module__})
