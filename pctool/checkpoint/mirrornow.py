"""Mirror what is not on S3, once and now: what the mirror beside a launch does while a job runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pctool.checkpoint.lineage import look, rejected, turned_away
from pctool.checkpoint.mirror import Mirror, finish
from pctool.checkpoint.stores import order
from pctool.checkpoint.target import Target
from pctool.errors import UsageError
from pctool.run.ledger import Event, Ledger


@dataclass(frozen=True, kw_only=True)
class Mirrored:
    """What was copied (name -> bytes), what is left, newest first, and the last reason that the mirror gave."""

    complete: bool
    copied: dict[str, int]
    left: tuple[str, ...]
    why: str


def mirror_now(target: Target, attempt: int) -> Mirrored:
    """Mirror all that is complete on the shared file system, in the name of the run's newest attempt.

    Three tries. Raises UsageError without a store, FencedError if a newer attempt was claimed meanwhile.
    """
    remote = target.store_of("s3")
    if target.run is None or remote is None or target.name is not None:
        raise UsageError("there is no S3 to mirror this to", fix="give a run directory, and --store s3://bucket/prefix")
    local = target.stores[0]
    newest = max([attempt, 0, *(order(name)[0] for name in local.names())])
    ledger = Ledger(target.run.ledger)
    before = len(ledger.read())
    all_there = finish(Mirror(target.run, remote, newest), 0.0) == 0
    events = ledger.read()
    said = events[before:]
    failures = [str(event.fields.get("error", "")) for event in said if event.event == "mirror-failed"]
    return Mirrored(
        complete=all_there,
        copied={
            str(event.fields.get("name")): int(event.fields.get("bytes", 0))
            for event in said
            if event.event == "mirrored"
        },
        left=() if all_there else tuple(_left(target, events)),
        why=failures[-1] if failures and not all_there else "",
    )


def as_json(done: Mirrored) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt mirror --json`."""
    copied = [{"name": name, "step": order(name)[1], "bytes": size} for name, size in done.copied.items()]
    return {"complete": done.complete, "mirrored": copied, "left": list(done.left), "why": done.why or None}


def _left(target: Target, events: Iterable[Event]) -> list[str]:
    """Return what is complete here, wanted, and not known to be on S3."""
    events = list(events)
    away, passed_over = turned_away(events), rejected(events)
    there = {str(event.fields.get("name")) for event in events if event.event == "mirrored"}
    names = [name for name in target.stores[0].names() if name not in there | passed_over and not away(name)]
    return sorted((name for name in names if look(target.stores[0], name).ok), key=order, reverse=True)
