"""What checkpoints there are, on which tier, how each stands, and which one the run would go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pctool.checkpoint.foreign import ForeignCheckpointError, is_taken
from pctool.checkpoint.lineage import BelowDurableError, find_resume, turned_away, unsound_copies
from pctool.checkpoint.manifest import Manifest, Verdict, judge
from pctool.checkpoint.stores import Store, StoreUnreadableError, order
from pctool.checkpoint.target import Target, pick
from pctool.run.ledger import Event

_AT_ONCE = 8  # tiers are asked by several threads: on S3 each look costs two answers


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A checkpoint on one tier, by manifest, names and sizes: what was found, not what the manifest promises."""

    verdict: Verdict
    bytes: int
    files: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint. `foreign` is the run that saved what only S3 has, where that is not this one."""

    name: str
    attempt: int
    step: int
    copies: Mapping[str, Copy]  # by tier, the nearest first
    resume: bool = False
    turned_away: bool = False
    foreign: str | None = None
    rejected: Mapping[str, str]  # tier -> what the ranks found wrong with its bytes

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the tiers on which it is complete."""
        return tuple(tier for tier, copy in self.copies.items() if copy.verdict.ok)

    @property
    def manifest(self) -> Manifest | None:
        """Return its manifest, from a complete copy if there is one."""
        verdicts = sorted((copy.verdict for copy in self.copies.values()), key=lambda verdict: not verdict.ok)
        return next((verdict.manifest for verdict in verdicts if verdict.manifest), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return all there is to say against it."""
        said = [f"{tier}: {copy.verdict.why}" for tier, copy in self.copies.items() if not copy.verdict.ok]
        said += [f"{tier}: the ranks found it damaged: {why}" for tier, why in self.rejected.items()]
        said += ["the owner turned away from it"] if self.turned_away else []
        said += [f"saved by another run, {self.foreign}"] if self.foreign else []
        return tuple(said)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All checkpoints, newest first; `resume` is None, and `held` says why, where a run would not go on by itself."""

    rows: tuple[Row, ...]
    resume: str | None = None
    held: str | None = None


def list_checkpoints(target: Target) -> Listing:
    """Return all checkpoints of the target, or the one that it names. No data is read.

    Raises NotFoundError where an address on S3, or a name, has none; StoreUnreadableError or AwsError where a tier
    cannot be read.
    """
    listed = target.names()
    if target.run is not None and target.name is None and not any(listed.values()):
        return Listing(rows=(), held=_resume(target, [])[1])
    names = pick(target, listed)
    events = target.events()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = list(pool.map(lambda name: _row(target, name, listed, events), names))
    resume, held = _resume(target, rows)
    return Listing(rows=tuple(_marked(row, resume) for row in rows), resume=resume, held=held)


def look_at(store: Store, name: str) -> Copy:
    """Return one checkpoint on one tier."""
    data, sizes = store.manifest(name), store.sizes(name)
    return Copy(verdict=judge(data, sizes, name=name), bytes=sum(sizes.values()), files=len(sizes))


def as_json(target: Target, listing: Listing, now: float) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt ls --json`."""
    return {
        "run": str(target.run.path) if target.run else None,
        "store": target.store,
        "resume": listing.resume,
        "held": listing.held,
        "checkpoints": [_row_json(row, now) for row in listing.rows],
    }


def _row_json(row: Row, now: float) -> dict[str, Any]:
    manifest = row.manifest
    return {
        "name": row.name,
        "attempt": row.attempt,
        "step": row.step,
        "complete": bool(row.tiers),
        "where": list(row.tiers),
        "bytes": max(copy.bytes for copy in row.copies.values()),
        "files": max(copy.files for copy in row.copies.values()),
        "world_size": manifest.world_size if manifest else None,
        "time": manifest.time if manifest else None,
        "age_s": round(now - manifest.time, 1) if manifest else None,
        "parent": manifest.parent if manifest else None,
        "saved_by": manifest.run if manifest else None,
        "resume": row.resume,
        "turned_away": row.turned_away,
        "foreign": row.foreign is not None,
        "notes": list(row.notes),
        "tiers": {
            tier: {"complete": copy.verdict.ok, "why": copy.verdict.why, "bytes": copy.bytes, "files": copy.files}
            for tier, copy in row.copies.items()
        },
    }


def _row(target: Target, name: str, listed: Mapping[str, Sequence[str]], events: Sequence[Event]) -> Row:
    copies = {store.tier: look_at(store, name) for store in target.stores if name in listed[store.tier]}
    unsound = unsound_copies(events)
    row = Row(
        name=name,
        attempt=order(name)[0],
        step=order(name)[1],
        copies=copies,
        turned_away=turned_away(events)(name),
        rejected={tier: unsound[name, tier] for tier in copies if (name, tier) in unsound},
    )
    if target.run is not None and row.tiers == ("s3",) and row.manifest is not None:
        ours = _is_copy(row) or is_taken(target.run, name, row.manifest, events)
        return row if ours else replace(row, foreign=row.manifest.run)
    return row


def _is_copy(row: Row) -> bool:
    """Return whether the run directory has, if not whole, a checkpoint of the very same manifest."""
    here = row.copies.get("posix")
    return here is not None and here.verdict.manifest is not None and here.verdict.manifest == row.manifest


def _resume(target: Target, rows: Sequence[Row]) -> tuple[str | None, str | None]:
    """Return what the next attempt goes on from; or None, and why it would be held, if it would be."""
    if target.run is None:
        if target.name is not None:
            return None, None  # the others were not looked at
        return next((row.name for row in rows if row.tiers), None), None
    try:
        point = find_resume(target.run, target.store)
    except (BelowDurableError, ForeignCheckpointError, StoreUnreadableError) as error:
        return None, error.what
    return (point.name if point else None), None


def _marked(row: Row, resume: str | None) -> Row:
    return replace(row, resume=True) if row.name == resume else row
