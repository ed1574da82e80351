"""The save plan of torch.distributed.checkpoint, made once and kept for as long as the state has the same shape.

Which rank writes which shard, and DCP's index of all of them, need every rank's word; so the ranks meet for it at the
first save, and again only where a rank's entries, shapes or shards have changed. Where merely the length of something
that is serialised anew each time has changed, rank 0 is told the new places and writes a new index.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from pctool.checkpoint.group import Group
from pctool.checkpoint.image import Image, has_fixed_form, lay_out, serialise
from pctool.errors import IncompleteError

Places = list[tuple[MetadataIndex, Any]]


@dataclass
class _Kept:
    """What is known from the last time the ranks met."""

    signature: Hashable
    plan: SavePlan
    image: Image
    metadata: Metadata | None  # on rank 0
    lengths: tuple[int, ...] = ()
    index: bytes = b""  # on rank 0


@dataclass(frozen=True)
class Values:
    """What this rank writes: tensors with a place of their own, and what is serialised behind them."""

    tensors: list[torch.Tensor]
    loose: list[bytes]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of what is serialised, in bytes."""
        return tuple(len(blob) for blob in self.loose)


class Planner:
    """One rank's part in the plan."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._kept: _Kept | None = None
        self._planner = DefaultSavePlanner()
        self._signature: Hashable = None
        self._made: list[SavePlan] = []  # on rank 0
        self._metadata: Metadata | None = None

    @property
    def image(self) -> Image:
        """Return the layout of this rank's file."""
        return self._known.image

    @property
    def index(self) -> bytes:
        """Return DCP's index of the whole checkpoint (rank 0)."""
        return self._known.index

    def take(self, state: dict[str, Any]) -> bool:
        """Take the state that is to be saved; return whether the plan must be made anew. Meets nobody."""
        self._planner.set_up_planner(state, None, self._group.rank == 0)
        self._signature = _signature(self._planner.state_dict, self._planner.mappings)
        return self._kept is None or self._kept.signature != self._signature

    def values(self) -> Values:
        """Return the values that the plan has this rank write."""
        kept = self._known
        fixed = {slot.index for slot in kept.image.slots}
        found = [(item.index, self._planner.lookup_object(item.index)) for item in kept.plan.items]
        tensors = [value.detach() for index, value in found if index in fixed]
        return Values(tensors, [serialise(value) for index, value in found if index not in fixed])

    def same_lengths(self, values: Values) -> bool:
        """Return whether the index that is there still tells the truth."""
        return values.lengths == self._known.lengths

    def plan(self) -> None:
        """Make the plan with all ranks."""
        local = self._group.agree_on_own("planning the save", self._planner.create_local_plan)
        plans = self._group.to_first(local)
        self._group.first(lambda: self._make(plans))
        mine = self._group.from_first(self._made)
        self._kept = self._group.agree_on_own("laying out the save", lambda: self._lay_out(mine))

    def describe(self, file: str, values: Values) -> None:
        """Tell rank 0 where everything lies, and make DCP's index there; with all ranks."""
        kept = self._known
        kept.lengths = values.lengths
        everywhere = self._group.to_first(kept.image.places(file, kept.lengths))
        if kept.metadata is not None:
            kept.index = _index(kept.metadata, everywhere)

    def forget(self) -> None:
        """Have the plan made anew at the next save: the ranks may know different ones."""
        self._kept = None

    def _make(self, plans: list[SavePlan]) -> None:
        try:
            self._made, self._metadata = self._planner.create_global_plan(plans)
        except ValueError as error:  # entries of different ranks that do not go together
            raise IncompleteError(f"the ranks' states do not go together: {error}") from error

    def _lay_out(self, mine: SavePlan) -> _Kept:
        plan = self._planner.finish_plan(mine)
        values = [self._planner.lookup_object(item.index) for item in plan.items]
        return _Kept(self._signature, plan, lay_out(plan.items, values), self._metadata)

    @property
    def _known(self) -> _Kept:
        assert self._kept is not None  # `plan` comes first
        return self._kept


def _index(metadata: Metadata, everywhere: Sequence[Places]) -> bytes:
    """Return the bytes of `.metadata`, as DCP's FileSystemWriter makes them."""
    found = dataclasses.replace(
        metadata,
        storage_data={index: info for places in everywhere for index, info in places},
        storage_meta=StorageMeta(),
    )
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # torch before 2.9 has none
        found.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(found)


def _signature(flat: Mapping[str, Any], mappings: Mapping[str, Any]) -> Hashable:
    """Return what the plan depends on: names, kinds, shapes, dtypes and shards."""
    return tuple((key, mappings.get(key), *_kind(value)) for key, value in flat.items())


def _kind(value: Any) -> tuple[Hashable, ...]:
    if isinstance(value, DTensor):
        local = value.to_local()
        spec = (value.device_mesh, value.placements)
        return ("sharded", tuple(value.shape), value.dtype, spec, tuple(local.shape), has_fixed_form(local))
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, has_fixed_form(value))
    return ("value",)
