"""The stop agreement among threads that play ranks, over a store in memory: no torch, no processes."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from pctool.train.stop import AHEAD, Costs, Decision, StopAgreement

COSTS = Costs(step_s=0.001, save_s=0.01)
HANG_S = 20.0  # a run that takes this long is stuck


class MemoryStore:
    """What a TCPStore does, among threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        self.wait([key], timedelta(seconds=HANG_S))
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: all(key in self._values for key in keys), timeout=timeout.total_seconds()
            )
        if not there:
            raise RuntimeError("wait timeout")


@dataclass
class Flags:
    """A page made by hand."""

    stop_requested: bool = False
    may_publish: bool = False
    deadline: float = 0.0


@dataclass
class Gang:
    """Ranks that train, save every few steps and at the end, and stop when they agree to."""

    world: int
    until: int
    every: int = 10
    lockstep: bool = True
    pause: float = 0.0005  # seconds a step takes at most
    seed: int = 0
    slow_rank: int | None = None
    store: MemoryStore = field(default_factory=MemoryStore)
    ends: dict[int, Decision | int] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flags = [Flags() for _ in range(self.world)]
        self.steps = [0] * self.world
        self.stepping = threading.Barrier(self.world)
        self.saving = threading.Barrier(self.world)

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._guarded, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(HANG_S)
        assert not any(thread.is_alive() for thread in threads), f"stuck at steps {self.steps}, ended {self.ends}"
        assert not self.errors, self.errors

    def request(self, late: list[int], deadline: float = 0.0) -> None:
        """Set the flags as launches do: those of `late` ranks last, and only then the leader's permission."""
        for rank in [rank for rank in range(self.world) if rank not in late]:
            self.flags[rank].deadline = deadline
            self.flags[rank].stop_requested = True
        time.sleep(0.01)
        for rank in late:
            self.flags[rank].deadline = deadline
            self.flags[rank].stop_requested = True
        self.flags[0].may_publish = True

    def _guarded(self, rank: int) -> None:
        try:
            self.ends[rank] = self._train(rank)
        except BaseException as error:
            self.errors.append(error)
            raise

    def _train(self, rank: int) -> Decision | int:
        chance = random.Random(self.seed * 1000 + rank)
        flags = self.flags[rank]
        agreement = StopAgreement(store=self.store, flags=flags, rank=rank, world=self.world, until=self.until)
        while self.steps[rank] < self.until:
            time.sleep(chance.random() * self.pause * (5 if rank == self.slow_rank else 1))
            if self.lockstep:
                self.stepping.wait(HANG_S)
            self.steps[rank] += 1
            step = self.steps[rank]
            if step < self.until:
                if step % self.every == 0:
                    self.saving.wait(HANG_S)
                if flags.stop_requested:
                    decision = agreement.at_boundary(step, COSTS)
                    if decision is not None:
                        return decision
        agreement.at_end()
        self.saving.wait(HANG_S)
        return self.until


def stop_gang(gang: Gang, *, after: int, late: list[int], deadline: float = 0.0) -> None:
    threads = gang.start()
    limit = time.monotonic() + HANG_S
    while max(gang.steps) < after and time.monotonic() < limit and any(thread.is_alive() for thread in threads):
        time.sleep(0.0005)
    gang.request(late, deadline)
    gang.join(threads)


def assert_together(gang: Gang) -> None:
    assert sorted(gang.ends) == list(range(gang.world))
    assert len(set(gang.steps)) == 1, f"ranks ended at different steps: {gang.steps}"
    kinds = {type(end) for end in gang.ends.values()}
    assert len(kinds) == 1, f"some ranks stopped and some finished: {gang.ends}"


@pytest.mark.parametrize("seed", range(12))
def test_lockstep_ranks_stop_together(seed: int) -> None:
    gang = Gang(world=4, until=100_000, seed=seed)
    stop_gang(gang, after=5 + seed, late=[])
    assert_together(gang)
    assert all(isinstance(end, Decision) and end.save and end.step == gang.steps[0] for end in gang.ends.values())


@pytest.mark.parametrize("seed", range(12))
def test_free_running_ranks_at_different_steps_stop_together(seed: int) -> None:
    """Without a collective a step, ranks are many steps apart: the target moves, once, to the farthest."""
    gang = Gang(world=4, until=100_000, every=100_000, lockstep=False, seed=seed, slow_rank=seed % 4)
    stop_gang(gang, after=20, late=[])
    assert_together(gang)


def test_a_rank_far_past_the_target_moves_it_once() -> None:
    gang = Gang(world=2, until=100_000, every=100_000, lockstep=False)
    gang.steps[1] = 50  # the follower begins 50 steps ahead, and stays so
    stop_gang(gang, after=60, late=[])
    assert_together(gang)
    target = int(gang.store.get("target"))
    assert gang.steps[0] > target + AHEAD
    assert gang.steps[0] == max(int(gang.store.get(f"ack/{rank}")) for rank in range(2))


@pytest.mark.parametrize("late", [[0], [3], [1, 2, 3]])
@pytest.mark.parametrize("seed", range(4))
def test_late_flags_are_not_waited_for_wrongly(late: list[int], seed: int) -> None:
    gang = Gang(world=4, until=100_000, seed=seed)
    stop_gang(gang, after=8, late=late)
    assert_together(gang)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lockstep", [True, False])
def test_a_stop_near_the_end_or_near_a_save_never_sticks(seed: int, lockstep: bool) -> None:
    """The request comes within the last steps: some ranks may be done before they see it."""
    gang = Gang(world=3, until=20, every=5, lockstep=lockstep, seed=seed, slow_rank=seed % 3)
    stop_gang(gang, after=14 + seed % 6, late=[])
    assert_together(gang)


def test_without_permission_nobody_stops() -> None:
    gang = Gang(world=2, until=40)
    threads = gang.start()
    for flags in gang.flags:
        flags.stop_requested = True
    gang.join(threads)
    assert gang.ends == {0: 40, 1: 40}


def test_a_save_that_cannot_fit_is_skipped_by_all() -> None:
    gang = Gang(world=3, until=100_000)
    stop_gang(gang, after=5, late=[], deadline=time.time() + 0.005)  # COSTS.save_s is 0.01
    assert len(gang.ends) == 3
    for end in gang.ends.values():
        assert isinstance(end, Decision)
        assert not end.save
        assert end.predicted_s > end.left_s


def test_a_save_is_tried_where_none_was_measured() -> None:
    flags = Flags(stop_requested=True, may_publish=True, deadline=time.time() + 0.001)
    agreement = StopAgreement(store=None, flags=flags, rank=0, world=1, until=100)
    decision = agreement.at_boundary(7, Costs(step_s=1.0, save_s=None))
    assert decision is not None
    assert decision.save
    assert decision.step == 7


def test_a_silent_rank_is_named_and_not_waited_for_beyond_the_deadline() -> None:
    store, flags = MemoryStore(), Flags(stop_requested=True, may_publish=True, deadline=1000.0)
    leader = StopAgreement(store=store, flags=flags, rank=0, world=3, until=100, clock=lambda: 999.9)
    fast = Costs(step_s=0.0, save_s=0.0)
    assert leader.at_boundary(3, fast) is None
    store.set("ack/1", "5")
    store.wait = _never  # type: ignore[method-assign]
    decision = leader.at_boundary(3 + AHEAD, fast)
    assert decision is not None
    assert not decision.save
    assert "rank 2" in decision.why
    assert "rank 1" not in decision.why


def _never(keys: list[str], timeout: timedelta, /) -> None:
    assert timeout.total_seconds() <= 5.0
    raise RuntimeError("wait timeout")


def test_the_leader_publishes_one_step_ahead_when_steps_are_long() -> None:
    store, flags = MemoryStore(), Flags(stop_requested=True, may_publish=True)
    leader = StopAgreement(store=store, flags=flags, rank=0, world=2, until=100)
    assert leader.at_boundary(3, Costs(step_s=30.0, save_s=1.0)) is None
    assert store.get("target") == b"4"


def test_a_rank_that_was_done_before_the_request_takes_the_others_to_the_end() -> None:
    """It already waits in the last save, where the others must come; it looks at no target any more."""
    gang = Gang(world=2, until=60, every=1000, lockstep=False, pause=0.05)
    gang.steps[1] = 59
    threads = gang.start()
    threads[1].join(0.2)
    assert gang.steps[1] == 60
    gang.request(late=[])
    gang.join(threads)
    assert gang.ends == {0: 60, 1: 60}
