"""The random states of one rank: Python, NumPy where it is in use, torch on CPU and on the current CUDA device."""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rng-{rank:05d}.json"


def capture() -> dict[str, Any]:
    """Return this process's random states as plain JSON values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": _pack(torch.get_rng_state())}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _pack(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_unpack(state["torch"]))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(state["cuda"]))


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the random states as they were, whatever happens inside."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have the random states depend on `seed` (of up to 63 bits) alone inside, and leave them as they were."""
    with preserved():
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change devices that are not preserved
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)
        yield


def draw_seed() -> int:
    """Return a seed that follows from the present random state, which stays as it is."""
    with preserved():
        return int(torch.empty((), dtype=torch.int64).random_())


def mix(seed: int, *numbers: int) -> int:
    """Return a seed of 63 bits that follows from a seed and some numbers, as different as can be for each of them."""
    text = " ".join(str(number) for number in (seed, *numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
