"""Save without stopping the training: copy the state into host memory, and let the writer do the rest.

A save stalls the training for the copy alone. Ranks meet once for it, in one small reduction over gloo; the plan and
the host memory are those of the save before. What follows (files, checksums, fsync, the commit) goes on in the writers
while the ranks train. One save is in flight at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pctool.checkpoint import own as per_rank
from pctool.checkpoint import rng
from pctool.checkpoint.client import Result, WriterClient, WriterLostError
from pctool.checkpoint.group import Group
from pctool.checkpoint.planning import Planner, Values
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.staging import Copied, Staging
from pctool.checkpoint.stores import order as place_of
from pctool.checkpoint.torch import METADATA, Identity, State, quiet
from pctool.errors import FencedError, IncompleteError
from pctool.run.layout import checkpoint_name

_FAILED, _PLAN, _LENGTHS, _WRITER, _BUSY = range(5)  # places in what the ranks agree on at each save
_FLAGS = 5
_PATIENCE_S = 30.0  # a wait for the save before is said after so long, and after double that, and so on


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine works: where its writer is reached (None: it starts one), and what its coordinator is told."""

    identity: Identity
    host: str = "127.0.0.1"  # where the coordinator listens: rank 0's address that other nodes reach
    writer: str | None = None
    keep: Retention = field(default_factory=Retention)
    page: str | None = None  # launch's page on node 0
    busy: Literal["wait", "skip"] = "wait"


@dataclass(frozen=True, kw_only=True)
class Started:
    """A save that the training need not wait for. `stall_s` is what it took of the training's time."""

    name: str
    step: int
    stall_s: float
    waited_s: float = 0.0  # for the save before, besides
    copied: Copied | None = None


class Engine:
    """The saves of one rank. Its methods meet all ranks, in the same order on each."""

    def __init__(
        self,
        setup: Setup,
        group: Group,
        *,
        say: Callable[[str], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an engine. `on_commit` is called in another thread once a checkpoint is complete."""
        self._setup, self._group, self._say = setup, group, say
        self._planner = Planner(group)
        self._staging = Staging()
        self._client = WriterClient(setup.writer, say=say, on_commit=on_commit)
        self._sender: threading.Thread | None = None
        self._copying = ""
        self._shared = 0  # the generation of the memory that the writer knows
        self._random = b""
        self.last: Result | None = None  # of the last save that is over

    def start(self) -> None:
        """Start this rank's writer without waiting for it: the first save finds it ready. It may fail until then."""
        try:
            self._client.connect()
        except WriterLostError as error:
            self._say(error.what)

    def save(
        self, state: State, step: int, *, parent: str | None, position: Mapping[str, Any], wait: bool = False
    ) -> Started | None:
        """Copy the state and have it written; return as soon as it is copied, None where the save is skipped.

        Skipped is one that is due while another is in flight, with `busy="skip"` and without `wait`. Raises
        RanksFailedError on every rank if it failed on any, FencedError if a newer attempt has been seen.
        """
        clock = time.monotonic()
        self.settle(0.0 if self.skips and not wait else None)
        busy = self.in_flight is not None
        waited, began, clock = time.monotonic() - clock, time.time(), time.monotonic()
        mine = self._take(state)
        needs = self._agree(mine, busy)
        if needs[_BUSY]:
            return None
        if needs[_WRITER]:
            self._meet()
        values = self._values(mine, needs)
        name = checkpoint_name(self._setup.identity.attempt, step)
        copied = self._copy(values, state)
        stall = time.monotonic() - clock
        order = None
        if self._group.rank == 0:
            fields = self._fields(parent, position)
            order = {"name": name, "step": step, "began": began, "fields": fields, "stall_s": stall, "waited_s": waited}
        self._hand_over(name, copied, order)
        done = copied if isinstance(copied, Copied) else None
        return Started(name=name, step=step, stall_s=stall, waited_s=waited, copied=done)

    def settle(self, timeout: float | None = None) -> Result | None:
        """Wait for the save in flight, if there is one; return how the last save that is over ended.

        Raises FencedError.
        """
        if self._sender is not None:
            self._sender.join(timeout)
            if self._sender.is_alive():
                return self.last
            self._sender = None
        result = self._verdict(timeout)
        if result is not None:
            self.last = result
            if result.fenced:
                raise FencedError(
                    result.why, where=str(self._setup.identity.run.path), fix="end this attempt: another has taken over"
                )
        return self.last

    @property
    def skips(self) -> bool:
        """Return whether a save that is due while another is in flight is left out."""
        return self._setup.busy == "skip"

    @property
    def in_flight(self) -> str | None:
        """Return the name of the checkpoint that is being written, None if none is."""
        return self._copying if self._sender is not None else self._client.in_flight

    def close(self) -> None:
        """Wait for the save in flight, then leave."""
        try:
            self.settle()
        finally:
            self.leave()

    def leave(self) -> None:
        """Let the writer go, which ends what it was ordered, and free the host memory."""
        self._client.close(wait=self.in_flight is None)  # one that is at work was waited for long enough
        self._staging.close()

    def _verdict(self, timeout: float | None) -> Result | None:
        """Wait for how the save in flight ends; say at growing intervals that this is still being waited for."""
        began = time.monotonic()
        end = math.inf if timeout is None else began + timeout
        patience = _PATIENCE_S
        while True:
            result = self._client.wait(max(0.0, min(end, began + patience) - time.monotonic()))
            waited = time.monotonic() - began
            if result is not None or self.in_flight is None or began + waited >= end:
                return result
            if waited >= patience:
                patience *= 2
                self._complain(waited)

    def _complain(self, waited: float) -> None:
        """Say so on every rank: others may wait for this one without a word, in a collective."""
        name = self.in_flight or ""
        mine = "" if self._client.written == name else f": the files of rank {self._group.rank} are not written yet"
        self._say(f"still waiting for the save of step {place_of(name)[1]} (for {waited:.0f} s){mine}")

    def _take(self, state: State) -> _Mine:
        """Take this rank's part of the state; what fails is told to all in the agreement that follows."""
        mine = _Mine()
        try:
            mine.shared, own = state.collect()
            mine.random = json.dumps(rng.capture()).encode()
        except Exception as error:  # noqa: BLE001 - told to every rank, which raises
            mine.error, own = f"{type(error).__name__}: {error}", {}
        if state.has_own:
            digests = self._group.gather({part: hashlib.sha256(data).hexdigest() for part, data in own.items()})
            mine.shared |= per_rank.entries(own, digests, self._group.rank)
        try:
            if not mine.error:
                with quiet(), torch.no_grad():  # a DTensor's local part goes through autograd otherwise
                    mine.fresh = self._planner.take(mine.shared)
                    mine.values = None if mine.fresh else self._planner.values()
        except Exception as error:  # noqa: BLE001 - told to every rank, which raises
            mine.error = f"{type(error).__name__}: {error}"
        return mine

    def _agree(self, mine: _Mine, busy: bool) -> list[int]:
        """Return what any rank needs. Raises RanksFailedError on every rank if taking the state failed on any."""
        flags = [0] * _FLAGS
        flags[_FAILED] = int(bool(mine.error))
        flags[_PLAN] = int(mine.fresh)
        flags[_LENGTHS] = int(mine.values is not None and not self._planner.same_lengths(mine.values))
        flags[_WRITER] = int(not (self._client.alive and self._client.joined))
        flags[_BUSY] = int(busy)
        needs = self._group.most(flags)
        if needs[_FAILED]:
            self._planner.forget()
            self._group.agree("collecting the state", lambda: _raise_if(mine.error))
        return needs

    def _values(self, mine: _Mine, needs: list[int]) -> Values:
        """Return what this rank writes, the plan and DCP's index being up to date."""
        if needs[_PLAN]:
            with quiet():
                self._group.agree("planning the save", lambda: self._planner.take(mine.shared))
                self._planner.plan()
                mine.values = self._group.agree_on_own("serialising the state", self._planner.values)
        assert mine.values is not None
        if needs[_PLAN] or needs[_LENGTHS]:
            self._planner.describe(self._file, mine.values)
        self._random = mine.random
        return mine.values

    def _meet(self) -> None:
        """Have all writers know the coordinator. A writer that died is replaced. Raises RanksFailedError."""
        self._shared = 0
        token = secrets.token_hex(16)
        self._group.agree("starting the checkpoint writer", self._connect)
        host, port, token = self._group.first(lambda: (*self._coordinate(token), token))
        self._group.agree(
            "reaching the writer of rank 0",
            lambda: self._client.join(host, port, rank=self._group.rank, token=token),
        )

    def _connect(self) -> None:
        if not self._client.alive:
            self._client.connect()

    def _coordinate(self, token: str) -> tuple[str, int]:
        setup = self._setup
        run = str(setup.identity.run.path.absolute())
        return self._client.coordinate(
            run=run,
            attempt=setup.identity.attempt,
            world=self._group.world,
            host=setup.host,
            token=token,
            keep=setup.keep.fields(),
            page=setup.page,
        )

    def _copy(self, values: Values, state: State) -> Copied | str:
        """Copy into the host memory; return why not where that fails, since the other ranks have gone on."""
        try:
            image, staging = self._planner.image, self._staging
            if staging.fit(image.fixed + sum(values.lengths)) or staging.image is not image:
                staging.prepare(image, values.tensors)
            if self._shared != staging.generation:
                self._client.share(staging.fd, staging.capacity)
                self._shared = staging.generation
            staging.append(image.fixed, values.loose)
            late = state.late_pointers() if any(tensor.is_cuda for tensor in values.tensors) else frozenset()
            return staging.copy(values.tensors, late=[tensor.data_ptr() in late for tensor in values.tensors])
        except Exception as error:  # noqa: BLE001 - told to every rank through the writers
            return f"{type(error).__name__}: {error}"

    def _fields(self, parent: str | None, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the manifest says besides the files."""
        identity = self._setup.identity
        return {
            "parent": parent,
            "world_size": self._group.world,
            "topology": dict(identity.topology),
            "position": dict(position),
            "code": identity.code,
            "config": identity.config,
        }

    def _hand_over(self, name: str, copied: Copied | str, order: dict[str, Any] | None) -> None:
        """Give the copy to the writer, once it is whole; on a device that is later than now."""
        small = {rng.file_name(self._group.rank): self._random}
        if self._group.rank == 0:
            small[METADATA] = self._planner.index
        folder = self._setup.identity.run.checkpoints / name
        size = self._staging.size
        # as much as last time; before there was one, as if all ranks had as much as this one
        total = self.last.bytes if self.last is not None and self.last.ok else size * self._group.world
        need = (total, 2 * self._group.world + 2) if order is not None else None

        def send() -> None:
            if isinstance(copied, str):
                self._client.abort(name, copied, order=order)
                return
            copied.wait()
            self._client.save(name, folder, file=self._file, size=size, small=small, order=order, need=need)

        if isinstance(copied, Copied) and copied.on_device:
            self._copying = name
            self._sender = threading.Thread(target=send, name="copied", daemon=True)
            self._sender.start()
        else:
            send()

    @property
    def _file(self) -> str:
        return f"__{self._group.rank}_0.distcp"


@dataclass
class _Mine:
    """One rank's part of a save before the ranks have agreed on it."""

    shared: dict[str, Any] = field(default_factory=dict)
    random: bytes = b""
    values: Values | None = None
    fresh: bool = False
    error: str = ""


def _raise_if(why: str) -> None:
    if why:
        raise IncompleteError(why)
