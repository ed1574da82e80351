"""What each rank saves of its own, as entries of a checkpoint: pickled, and once where it is the same on every rank.

DCP would keep one rank's value of each plain entry, and load only what the fresh object has a place for.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.serialization import default_restore_location

PREFIX = "extra/"  # extra/<name>/rank-<rank>, or extra/<name>/all


def entries(own: Mapping[str, bytes], digests: Sequence[Mapping[str, str]], rank: int) -> dict[str, bytes]:
    """Return the entries that this rank writes: what is the same on every rank is written once."""
    written: dict[str, bytes] = {}
    for name, data in own.items():
        if any(other.get(name) != digests[rank][name] for other in digests):
            written[f"{PREFIX}{name}/rank-{rank:05d}"] = data
        elif rank == 0:
            written[f"{PREFIX}{name}/all"] = data
    return written


def ranks_in(names: Iterable[str], name: str) -> list[str]:
    """Return the entries of a part that differed between the ranks, in rank order."""
    return sorted(key for key in names if key.startswith(f"{PREFIX}{name}/rank-"))


def key_in(names: Collection[str], name: str, rank: int) -> str | None:
    """Return the entry that this rank takes for a part of `extra`, None where it was saved as one value by DCP."""
    if f"{PREFIX}{name}/all" in names:
        return f"{PREFIX}{name}/all"
    ranks = ranks_in(names, name)
    return ranks[rank % len(ranks)] if ranks else None


def pack(value: Any) -> bytes:
    """Return a value as bytes, which are the same for equal values, as far as pickle goes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what was packed, its CUDA tensors on this rank's device."""
    # the bytes are as trusted as DCP's own, which are pickles too
    return torch.load(io.BytesIO(data), map_location=_here, weights_only=False)


def _here(storage: Any, location: str) -> Any:
    """Put what was on any CUDA device on this rank's own, or on the CPU where there is none."""
    if location.startswith("cuda") and torch.cuda.is_available():
        device = f"cuda:{torch.cuda.current_device()}"
        return default_restore_location(storage, device)  # type: ignore[no-untyped-call]
    return storage
