"""Iterate a data loader so that the position is the batches trained on, not what the workers fetched ahead."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from pctool.checkpoint import rng
from pctool.errors import UsageError
from pctool.train.sampler import ResumableSampler


def protect_workers(loader: Any) -> None:
    """Make a DataLoader's workers ignore SIGTERM and SIGUSR1, so that they outlive a signal until the save is done.

    So the rank has to end them itself: multiprocessing's way, SIGTERM and a wait without bound, would hang a rank
    that ends by an exception.
    """
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        loader.worker_init_fn = functools.partial(ignore_signals, loader.worker_init_fn)
        atexit.unregister(end_workers)
        atexit.register(end_workers)  # after multiprocessing's own hook, so it runs before that


def end_workers() -> None:
    """Kill this process' daemonic children, which is what a DataLoader's workers are. They hold nothing to lose."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker dies
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def ignore_signals(then: Callable[[int], Any] | None, worker: int) -> None:
    """Ignore SIGTERM and SIGUSR1 in this process, then run the worker_init_fn that the script gave."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if then is not None:
        then(worker)


def batch_size_of(loader: Any, sampler: ResumableSampler) -> int:
    """Return the loader's batch size, which turns batches into a sample position.

    Raises UsageError if it has none, or deals out another sampler's samples.
    """
    size = getattr(loader, "batch_size", None)
    if isinstance(loader, DataLoader) and loader.sampler is not sampler:
        raise UsageError(
            "the sampler given to Run(...) is not the one that the loader uses",
            fix="give the same ResumableSampler to DataLoader(..., sampler=sampler) and to Run(..., sampler=sampler)",
        )
    if not isinstance(size, int):
        raise UsageError(
            "the loader has no batch_size, so a ResumableSampler cannot count its samples",
            fix="give DataLoader batch_size=... and sampler=..., not batch_sampler",
        )
    return size


@dataclass(frozen=True)
class Place:
    """Where a loader without a ResumableSampler stands: its epoch, and the batches of it that were trained on."""

    epoch: int = 0
    batches: int = 0


def stream(loader: Iterable[Any], seed: int) -> Iterator[tuple[Place, Any]]:
    """Yield the batches of a loader with a ResumableSampler, which is endless itself and starts at its position.

    Starting it draws nothing from the random states, so that a resumed run has the same ones; the workers' own states
    follow from `seed`.
    """
    while True:
        with rng.seeded(seed):
            batches = iter(loader)
        empty = True
        for batch in batches:
            empty = False
            yield Place(), batch
        if empty:
            raise _no_batch()


def endless(loader: Iterable[Any], start: Place, seed: int) -> Iterator[tuple[Place, Any]]:
    """Yield batches without end, each with the place behind it; for loaders without a ResumableSampler.

    The loader is started anew each epoch, with random states that follow from `seed` and the epoch alone: a shuffled
    order and the workers' states are others in each epoch, and the same ones after a restart. What was done of the
    first epoch is drawn and dropped.
    """
    own = {id(generator): (generator, generator.initial_seed()) for generator in _generators(loader)}
    epoch, skip = start.epoch, start.batches
    while True:
        _set_epoch(loader, epoch)
        for generator, its_seed in own.values():
            generator.manual_seed(rng.mix(its_seed, epoch))
        with rng.seeded(rng.mix(seed, epoch)):
            batches = iter(loader)
            first = list(islice(batches, 1))  # here, since samplers draw when they are asked for their first index
            for _ in islice(batches, max(skip - 1, 0)):
                pass
        if not first:
            raise _no_batch()
        if not skip:
            yield Place(epoch, 1), first.pop()
        for count, batch in enumerate(batches, start=max(skip, 1) + 1):
            yield Place(epoch, count), batch
        epoch, skip = epoch + 1, 0


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of its own that a loader, or its sampler, draws from: they know of no restart."""
    own = (getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None)))
    return [generator for generator in own if isinstance(generator, torch.Generator)]


def _no_batch() -> UsageError:
    return UsageError("the loader yields no batch", fix="check its batch_size and drop_last, and the data set")


def _set_epoch(loader: Any, epoch: int) -> None:
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
