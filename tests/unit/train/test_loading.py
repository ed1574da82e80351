"""Batches from the position on, for loaders of any kind."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from pctool.checkpoint import rng
from pctool.errors import UsageError
from pctool.train.loading import Place, batch_size_of, endless
from pctool.train.sampler import ResumableSampler


def test_a_plain_loader_goes_on_from_its_place() -> None:
    whole = list(islice(endless([10, 20, 30], Place()), 8))
    assert [batch for _, batch in whole] == [10, 20, 30, 10, 20, 30, 10, 20]
    for done in range(1, 6):
        assert list(islice(endless([10, 20, 30], whole[done - 1][0]), 8 - done)) == whole[done:]


def test_a_loader_without_batches_is_refused_rather_than_asked_for_ever() -> None:
    with pytest.raises(UsageError, match="no batch"):
        next(endless([], Place()))


def test_starting_a_loader_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    data = list(range(6))
    loader: DataLoader[int] = DataLoader(data, batch_size=2, sampler=ResumableSampler(6, rank=0, world_size=1))  # type: ignore[arg-type]
    next(endless(loader, Place()))
    assert torch.equal(torch.rand(1), expected)


def test_the_epoch_is_told_to_a_sampler_that_asks() -> None:
    class Asks(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = [1, 2]
    loader: DataLoader[int] = DataLoader(data, sampler=Asks(data))  # type: ignore[arg-type]
    list(islice(endless(loader, Place(4, 1)), 3))
    assert Asks.epochs == [4, 5]


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
