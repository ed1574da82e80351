"""Batches from the position on, for loaders of any kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from pctool.checkpoint import rng
from pctool.errors import UsageError
from pctool.train.loading import Place, batch_size_of, endless, stream
from pctool.train.sampler import ResumableSampler


def test_a_plain_loader_goes_on_from_its_place() -> None:
    whole = list(islice(endless([10, 20, 30], Place(), 0), 8))
    assert [batch for _, batch in whole] == [10, 20, 30, 10, 20, 30, 10, 20]
    for done in range(1, 6):
        assert list(islice(endless([10, 20, 30], whole[done - 1][0], 0), 8 - done)) == whole[done:]


def test_a_loader_without_batches_is_refused_rather_than_asked_for_ever() -> None:
    with pytest.raises(UsageError, match="no batch"):
        next(endless([], Place(), 0))
    with pytest.raises(UsageError, match="no batch"):
        next(stream([], 0))


def test_starting_a_loader_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    data = list(range(6))
    loader: DataLoader[int] = DataLoader(data, batch_size=2, sampler=ResumableSampler(6, rank=0, world_size=1))  # type: ignore[arg-type]
    next(stream(loader, 0))
    assert torch.equal(torch.rand(1), expected)


def test_the_epoch_is_told_to_a_sampler_that_asks() -> None:
    class Asks(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = [1, 2]
    loader: DataLoader[int] = DataLoader(data, sampler=Asks(data))  # type: ignore[arg-type]
    list(islice(endless(loader, Place(4, 1), 0), 3))
    assert Asks.epochs == [4, 5]


class Augmented(Dataset[list[int]]):
    """Samples with a number from each random state, as an augmentation would draw it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[int]:
        import numpy

        return [index, int(torch.randint(10**9, ())), random.randrange(10**9), int(numpy.random.randint(10**9))]


LOADERS: dict[str, Callable[[int], Iterable[Any]]] = {
    "shuffled": lambda workers: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=workers),
    "of its own generator": lambda workers: DataLoader(
        Augmented(), batch_size=2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5)
    ),
    "distributed": lambda workers: DataLoader(
        Augmented(), batch_size=2, num_workers=workers, sampler=DistributedSampler(Augmented(), 1, 0)
    ),
}


def drawn(loader: Iterable[Any], start: Place, count: int, seed: int = 7) -> list[tuple[Place, Any]]:
    """Return batches as a loop gets them whose steps draw nothing from the random states of the CPU."""
    return [(place, [part.tolist() for part in batch]) for place, batch in islice(endless(loader, start, seed), count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_each_epoch_is_drawn_anew_and_is_the_same_after_a_restart(kind: str, workers: int) -> None:
    torch.manual_seed(1)
    whole = drawn(LOADERS[kind](workers), Place(), 9)
    epochs = [[batch for _, batch in whole[at : at + 3]] for at in (0, 3, 6)]
    for part in range(4):  # the order, and each number of an augmentation
        told = [str([batch[part] for batch in epoch]) for epoch in epochs]
        assert len(set(told)) == 3, f"epochs are alike: {told}"
    for done in (2, 3, 4):
        state = rng.capture()
        torch.manual_seed(done)  # what a restarted script has by then is of no account
        again = drawn(LOADERS[kind](workers), whole[done - 1][0], 9 - done)
        rng.restore(state)
        # without workers a batch is drawn with the run's own states, which a checkpoint has
        parts = slice(0, 1 if workers == 0 else 4)
        assert [(p, b[parts]) for p, b in again] == [(p, b[parts]) for p, b in whole[done:]]


def test_what_is_dropped_after_a_restart_draws_nothing() -> None:
    loader = LOADERS["shuffled"](0)
    batches = endless(loader, Place(), 3)
    for _ in range(2):
        next(batches)
    state = rng.capture()
    expected = [part.tolist() for part in next(batches)[1]]
    rng.restore(state)
    assert drawn(LOADERS["shuffled"](0), Place(0, 2), 1, seed=3) == [(Place(0, 3), expected)]


def test_ranks_of_their_own_seeds_draw_in_their_own_order() -> None:
    first, second = (drawn(LOADERS["shuffled"](0), Place(), 3, seed=seed) for seed in (1, 2))
    assert [batch[0] for _, batch in first] != [batch[0] for _, batch in second]


def test_the_run_and_the_loader_must_share_one_sampler() -> None:
    mine, other = (ResumableSampler(6, rank=0, world_size=1) for _ in range(2))
    loader: DataLoader[int] = DataLoader([1, 2, 3], batch_size=2, sampler=mine)  # type: ignore[arg-type]
    assert batch_size_of(loader, mine) == 2
    with pytest.raises(UsageError, match="not the one that the loader uses"):
        batch_size_of(loader, other)
    with pytest.raises(UsageError, match="no batch_size"):
        batch_size_of([1, 2], mine)


def test_random_states_come_back_exactly() -> None:
    import numpy

    def roll() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(1))

    state = rng.capture()
    first = roll()
    with rng.preserved():
        roll()
    second = roll()
    rng.restore(state)
    assert (roll(), roll()) == (first, second)
