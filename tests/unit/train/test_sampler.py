"""The sampler's position holds for any number of ranks."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.errors import UsageError
from pctool.train.sampler import ResumableSampler


def draw(length: int, position: int, world: int, batch: int, batches: int) -> list[int]:
    """Return what all ranks together train on from a position, in the order of the stream."""
    ranks = []
    for rank in range(world):
        sampler = ResumableSampler(length, seed=5, rank=rank, world_size=world)
        sampler.position = position
        ranks.append(list(islice(iter(sampler), batch * batches)))
    return [ranks[index % world][index // world] for index in range(world * batch * batches)]


@given(
    length=st.integers(1, 60),
    first=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)),
    second=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)),
)
def test_the_stream_is_the_same_for_any_number_of_ranks(
    length: int, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    done = first[0] * first[1] * first[2]
    total = done + second[0] * second[1] * second[2]
    whole = draw(length, 0, 1, 1, total)
    assert draw(length, 0, *first) + draw(length, done, *second) == whole
    for epoch in range(total // length):
        assert sorted(whole[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_epochs_are_shuffled_anew_and_the_seed_matters() -> None:
    whole = draw(50, 0, 1, 1, 100)
    assert whole[:50] != whole[50:]
    other = ResumableSampler(50, seed=6, rank=0, world_size=1)
    assert list(islice(iter(other), 50)) != whole[:50]
    plain = ResumableSampler(3, shuffle=False, rank=1, world_size=2)
    assert list(islice(iter(plain), 4)) == [1, 0, 2, 1]
    assert len(plain) == 2


def test_the_position_counts_every_rank() -> None:
    sampler = ResumableSampler(10, rank=1, world_size=4)
    sampler.advance(2)
    assert (sampler.position, sampler.epoch) == (8, 0)
    sampler.advance(2)
    assert (sampler.position, sampler.epoch) == (16, 1)
    again = ResumableSampler(10, rank=0, world_size=2)
    again.load_state_dict(sampler.state_dict())
    assert again.position == 16


@pytest.mark.parametrize("change", [{"length": 11}, {"seed": 1}, {"shuffle": False}])
def test_another_order_of_samples_is_refused(change: dict[str, int]) -> None:
    state = ResumableSampler(10, rank=0, world_size=1).state_dict()
    with pytest.raises(UsageError, match=f"{next(iter(change))} was"):
        ResumableSampler(10, rank=0, world_size=1).load_state_dict({**state, **change})


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        ResumableSampler(0)
