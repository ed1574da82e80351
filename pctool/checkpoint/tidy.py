"""Remove old checkpoints on request: the plan is a value, so that what is printed before is what is done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.foreign import copied_names, is_foreign
from pctool.checkpoint.lineage import Candidate, find_resume, parents_of, prune_plan, rejected, turned_away
from pctool.checkpoint.listing import look_at
from pctool.checkpoint.mark import marked
from pctool.checkpoint.refs import referred, removing
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.stores import Store, order
from pctool.checkpoint.target import Target
from pctool.errors import UsageError
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One checkpoint to be removed from one tier."""

    name: str
    store: Store
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is removed, oldest first, tier by tier; and what stays, of which `kept` are complete."""

    removals: tuple[Removal, ...]
    kept: dict[str, tuple[str, ...]]  # tier -> names, newest first

    @property
    def bytes(self) -> int:
        """Return how many bytes become free, on all tiers together."""
        return sum(removal.bytes for removal in self.removals)


def plan(target: Target, keep: Retention, *, now: float | None = None) -> Plan:
    """Return what `keep` removes from every tier of a run; `now` is in seconds since the epoch.

    The lineage is that of the checkpoint the run would go on from: what the owner turned away from and is newer is
    left alone, as are other runs' and damaged ones, and what other runs refer to. Raises BelowDurableError,
    ForeignCheckpointError, StoreUnreadableError or AwsError where the run could not go on: what would be removed may
    be all there is.
    """
    run = _run_of(target)
    events = target.events()
    point = find_resume(run, target.store)
    newest = order(point.name) if point else (-1, -1)
    at = time.time() if now is None else now
    tiers = {store.tier: _plan_tier(run, store, keep, events, newest, at) for store in target.stores}
    return Plan(
        removals=tuple(removal for removals, _ in tiers.values() for removal in removals),
        kept={tier: kept for tier, (_, kept) in tiers.items()},
    )


def _plan_tier(
    run: RunDir, store: Store, keep: Retention, events: Sequence[Event], newest: tuple[int, int], now: float
) -> tuple[list[Removal], tuple[str, ...]]:
    copies = {name: look_at(store, name) for name in store.names()}
    manifests = {name: copy.verdict.manifest for name, copy in copies.items() if copy.verdict.manifest}
    aside = _turned_away(copies, events, newest) | rejected(events)
    if store.tier == "s3":
        aside |= _strangers(run, {name: manifest.run for name, manifest in manifests.items()}, events)
    whole = [
        Candidate(name=name, attempt=order(name)[0], step=order(name)[1], verdicts={store.tier: copy.verdict})
        for name, copy in copies.items()
        if copy.verdict.ok and name not in aside
    ]
    # a damaged one still says what it came from, else those before it would pass for another lineage
    said = {name: manifest.parent or "" for name, manifest in manifests.items()}
    doomed = prune_plan(whole, keep, {**parents_of(events), **said}, now=now, held=referred(run))
    kept = (one.name for one in whole if one.name not in doomed)
    removals = [Removal(name=name, store=store, bytes=copies[name].bytes) for name in doomed]
    return removals, tuple(sorted(kept, key=order, reverse=True))


def remove(target: Target, planned: Plan, attempt: int) -> Iterator[Removal]:
    """Remove what was planned, yielding each once it is gone; what another run refers to meanwhile stays.

    The fence is checked before each: raises FencedError.
    """
    run = _run_of(target)
    ledger = Ledger(run.ledger)
    for removal in planned.removals:
        if removal.store.tier == "posix" and removal.name == marked(run, attempt):
            continue  # under way to S3
        check_fence(run, attempt)
        with removing(run, removal.name) as may:
            if may:
                removal.store.remove(removal.name)
                ledger.append("pruned", attempt=attempt, name=removal.name, tier=removal.store.tier)
        if may:
            yield removal


def as_json(planned: Plan, removed: Sequence[Removal], *, dry_run: bool) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt prune --json`."""
    return {
        "dry_run": dry_run,
        "removed": [
            {"name": one.name, "tier": one.store.tier, "step": order(one.name)[1], "bytes": one.bytes}
            for one in removed
        ],
        "kept": {tier: list(names) for tier, names in planned.kept.items()},
        "bytes": sum(one.bytes for one in removed),
    }


def _turned_away(names: Iterable[str], events: Sequence[Event], newest: tuple[int, int]) -> frozenset[str]:
    """Return what the owner turned away from and that would pass for the newest, since the run is not past it yet."""
    away = turned_away(events)
    return frozenset(name for name in names if away(name) and order(name) > newest)


def _strangers(run: RunDir, saved_by: Mapping[str, str], events: Sequence[Event]) -> frozenset[str]:
    """Return what other runs saved; what this run copied there is its own wherever it moved."""
    copied = copied_names(events)
    return frozenset(name for name, by in saved_by.items() if is_foreign(run, by) and name not in copied)


def _run_of(target: Target) -> RunDir:
    if target.run is None or target.name is not None:
        raise UsageError("checkpoints are pruned of a whole run", fix="give the run directory")
    return target.run
