"""Which checkpoint a run goes on from, and which ones may be removed.

The newest checkpoint is the greatest (attempt, step) among the complete ones, so that a late writer of an older attempt
never wins. "None" means that every tier was listed and came back empty, and that the ledger knows of none; a tier
that cannot be read raises. A checkpoint that is there but damaged is skipped and named; one that the ledger knows and
that has vanished stops the run, since resuming below it would lose work that nobody agreed to lose. So do damaged ones
where none is left that is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.foreign import is_taken, of_another
from pctool.checkpoint.manifest import Manifest, Verdict, judge
from pctool.checkpoint.mark import marked
from pctool.checkpoint.refs import referred, removing
from pctool.checkpoint.retention import MIN_KEPT, Retention, as_retention
from pctool.checkpoint.stores import Store, StoreUnreadableError, open_stores, order
from pctool.errors import IncompleteError
from pctool.run.layout import RunDir, parse_checkpoint_name
from pctool.run.ledger import Event, Ledger

_SHOWN = 3  # damaged checkpoints that a message names


class BelowDurableError(IncompleteError):
    """What is there is older than the highest durable step in the ledger, and nothing explains the loss."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One checkpoint by name, with the cheap verdict of every tier that has something of that name."""

    name: str
    attempt: int
    step: int
    verdicts: Mapping[str, Verdict]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the tiers on which it is complete, the nearest first."""
        return tuple(tier for tier, verdict in self.verdicts.items() if verdict.ok)

    @property
    def manifest(self) -> Manifest | None:
        """Return its manifest from the nearest tier on which it is complete."""
        return next((verdict.manifest for verdict in self.verdicts.values() if verdict.ok), None)

    @property
    def why(self) -> str:
        """Return what is wrong with it, tier by tier."""
        return "; ".join(f"{tier}: {verdict.why}" for tier, verdict in self.verdicts.items() if not verdict.ok)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where the next attempt goes on."""

    name: str
    attempt: int
    step: int
    tier: str


def candidates(stores: Sequence[Store], events: Sequence[Event] = ()) -> Iterator[Candidate]:
    """Yield the checkpoints of all tiers, newest first, each judged when its turn comes.

    Checkpoints that the owner turned away from (`accepted` in the ledger) are left out.
    """
    abandoned = turned_away(events)
    listings = {store.tier: set(store.names()) for store in stores}
    for name in sorted(set().union(*listings.values()), key=order, reverse=True):
        attempt, step = order(name)
        if not abandoned(name):
            verdicts = {store.tier: look(store, name) for store in stores if name in listings[store.tier]}
            yield Candidate(name=name, attempt=attempt, step=step, verdicts=verdicts)


def own_candidates(run: RunDir, stores: Sequence[Store], events: Sequence[Event]) -> Iterator[Candidate]:
    """Yield like `candidates`, as far as they are this run's to go on from.

    Raises ForeignCheckpointError in place of one that only S3 has whole and that another run saved there, and
    StoreUnreadableError in place of one whose manifest this pctool does not read.
    """
    for candidate in candidates(stores, events):
        kept = candidate.manifest
        on_s3_only = kept is not None and candidate.tiers == ("s3",) and not _is_copy(candidate)
        if kept is not None and on_s3_only and not is_taken(run, candidate.name, kept, events):
            raise of_another(run, next(store.where for store in stores if store.tier == "s3"), kept.run)
        _check_format(run, candidate)
        yield candidate


def _check_format(run: RunDir, candidate: Candidate) -> None:
    if not candidate.tiers and any(verdict.unknown_format for verdict in candidate.verdicts.values()):
        raise StoreUnreadableError(
            f"checkpoint {candidate.name} cannot be judged: {candidate.why}",
            where=str(run.checkpoints),
            fix="use the pctool version that wrote it, or turn away from it with "
            f"`pctool resume {run.path} --from STEP`",
        )


def _is_copy(candidate: Candidate) -> bool:
    """Return whether the run directory has, if not whole, a checkpoint of the very same manifest."""
    here = candidate.verdicts.get("posix")
    return here is not None and here.manifest is not None and here.manifest == candidate.manifest


def look(store: Store, name: str) -> Verdict:
    """Judge one checkpoint on one tier by manifest, names and sizes."""
    data = store.manifest(name)
    return judge(data, store.sizes(name) if data is not None else {}, name=name)


def find_resume(run: RunDir, store: str | None) -> ResumePoint | None:
    """Return the checkpoint that the next attempt goes on from, None for a run that has none.

    Only manifests, names and sizes are looked at; the ranks check every byte when they restore. What they rejected on
    every tier that has it, and what was not saved again since, is not asked of them once more. Raises
    BelowDurableError where that would be older than what the ledger knows to be durable, ForeignCheckpointError where
    it would be another run's, StoreUnreadableError or AwsError where a tier cannot be read.
    """
    events = Ledger(run.ledger).read()
    unsound = unsound_copies(events)
    damaged: dict[str, str] = {}
    for candidate in own_candidates(run, open_stores(run, store), events):
        if any((candidate.name, tier) not in unsound for tier in candidate.tiers):
            point = point_of(candidate)
            check_durable(run, events, point, damaged)
            return point
        told = [f"{tier}: {unsound[candidate.name, tier]}" for tier in candidate.tiers]
        damaged[candidate.name] = "; ".join(filter(None, [candidate.why, *told]))
    check_durable(run, events, None, damaged)
    return None


def point_of(candidate: Candidate) -> ResumePoint:
    """Return the resume point for a candidate that is complete on some tier."""
    return ResumePoint(name=candidate.name, attempt=candidate.attempt, step=candidate.step, tier=candidate.tiers[0])


def newest_attempt(run: RunDir, store: str | None) -> int:
    """Return the greatest attempt that was claimed or that a checkpoint of any tier is of, -1 if there is none.

    The next attempt has to be greater: its checkpoints would lose against those of an earlier life of the run, whose
    run directory is gone while its store is not. Raises StoreUnreadableError, AwsError or OSError.
    """
    names = [name for tier in open_stores(run, store) for name in tier.names()]
    return max([*run.attempt_numbers(), *(order(name)[0] for name in names)], default=-1)


def check_durable(run: RunDir, events: Iterable[Event], point: ResumePoint | None, damaged: Mapping[str, str]) -> None:
    """Raise BelowDurableError if the ledger knows a later step than `point` that is not among the `damaged`.

    Where nothing at all is left to go on from, damage explains nothing: that is for the owner to decide.
    """
    step = point.step if point else -1
    later = {name: at for name, at in durable(events).items() if at > step}
    lost = {name: at for name, at in later.items() if name not in damaged}
    if not lost and (point is not None or not later):
        return
    raise BelowDurableError(
        _why_lost(lost, point, damaged) if lost else f"every checkpoint is damaged: {_list(damaged)}",
        where=str(run.checkpoints),
        fix=f"bring {'the checkpoints' if lost else 'one'} back (is the file system or the bucket there?), or accept "
        f"the loss with `pctool resume {run.path} --from {max(step, 0)}`",
    )


def _why_lost(lost: Mapping[str, int], point: ResumePoint | None, damaged: Mapping[str, str]) -> str:
    name, highest = max(lost.items(), key=lambda item: item[1])
    none = f"all that is there is damaged: {_list(damaged)}" if damaged else "none is there now"
    have = f"the newest one there is {point.name} (step {point.step})" if point else none
    return f"the ledger says that checkpoint {name} (step {highest}) was complete, but {have}"


def _list(damaged: Mapping[str, str]) -> str:
    """Return the damaged ones for a message, newest first, and what is wrong with them."""
    shown = [f"{name} ({why})" for name, why in list(damaged.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else "")


def durable(events: Iterable[Event]) -> dict[str, int]:
    """Return the checkpoints (name -> step) of the current lineage that the ledger knows to be durable.

    A `resumed` event starts from its checkpoint: what lies above it is no longer in the lineage. `accepted` lowers it.
    What an attempt commits or mirrors after a later one has resumed, as one that was slow to notice, is not in it
    either, nor is what the owner turned away from.
    """
    events = list(events)
    known: dict[str, int] = {}
    current = 0
    for event in events:
        name, step = str(event.fields.get("name", "")), event.fields.get("step")
        if event.event in {"resumed", "fresh", "accepted"}:
            limit = int(step) if step is not None else -1
            known = {other: at for other, at in known.items() if at <= limit}
        if event.event in {"resumed", "fresh"}:
            current = event.attempt or 0
        if event.event == "pruned":
            known.pop(name, None)
        saved = event.event in {"committed", "mirrored"} and order(name)[0] >= current
        if (event.event == "resumed" or saved) and parse_checkpoint_name(name):
            known[name] = order(name)[1]
    caps = _abandoned(events)
    return {name: at for name, at in known.items() if not any(cap.excludes(*order(name)) for cap in caps)}


@dataclass(frozen=True, kw_only=True)
class _Cap:
    """What one `accepted` turned away from: of the attempts up to `newest`, all that is not at or before `chosen`."""

    newest: int
    step: int
    chosen: tuple[int, int] | None  # (attempt, step) of the checkpoint that was chosen

    def excludes(self, attempt: int, step: int) -> bool:
        # one of a later attempt is newer than the chosen one, even at a lower step: it would win
        later = self.chosen is not None and (attempt, step) > self.chosen
        return attempt <= self.newest and (step > self.step or later)


def turned_away(events: Iterable[Event]) -> Callable[[str], bool]:
    """Return what says of a name whether the owner turned away from it (`accepted` in the ledger)."""
    caps = _abandoned(events)
    return lambda name: any(cap.excludes(*order(name)) for cap in caps)


def _abandoned(events: Iterable[Event]) -> list[_Cap]:
    newest = 0
    caps = []
    for event in events:
        newest = max(newest, event.attempt or 0)
        if event.event == "accepted":
            chosen = parse_checkpoint_name(str(event.fields.get("name") or ""))
            # what was there then may be of attempts that this ledger never saw: another run's, or a lost ledger's
            newest = max(newest, int(event.fields.get("newest", 0)))
            caps.append(_Cap(newest=newest, step=int(event.fields["step"]), chosen=chosen))
    return caps


def parents_of(events: Iterable[Event]) -> dict[str, str]:
    """Return the parent of each committed checkpoint, as the ledger knows it also where the checkpoint is gone."""
    return {
        str(event.fields.get("name", "")): str(event.fields.get("parent") or "")
        for event in events
        if event.event == "committed"
    }


def ancestors(
    newest: Candidate, complete: Iterable[Candidate], parents: Mapping[str, str] = MappingProxyType({})
) -> list[Candidate]:
    """Return the lineage of `newest`, itself first, as far as its ancestors are still there.

    `parents` leads on where one in between is not: the mirror may have had no time for each.
    """
    by_name = {candidate.name: candidate for candidate in complete}
    chain: list[Candidate] = []
    seen: set[str] = set()
    name = newest.name
    while name and name not in seen:
        seen.add(name)
        found = by_name.get(name)
        chain += [found] if found is not None else []
        name = (found.manifest.parent if found is not None and found.manifest else parents.get(name)) or ""
    return chain


def prune_plan(
    complete: Sequence[Candidate],
    keep: int | Retention,
    parents: Mapping[str, str] = MappingProxyType({}),
    *,
    now: float = 0.0,
    held: Collection[str] = (),
) -> list[str]:
    """Return the names that may be removed: of the current lineage, what no rule of `keep` keeps.

    A bare number keeps so many; never fewer than MIN_KEPT stay. Other lineages are left alone until the current one has
    passed the greatest step of all of them; then only their age keeps them. What is `held` by other runs stays besides.
    `now` is in seconds since the epoch.
    """
    keep = as_retention(keep)
    if not complete or not keep.removes:
        return []
    newest = max(complete, key=lambda candidate: (candidate.attempt, candidate.step))
    chain = ancestors(newest, complete, parents)
    kept = keep.kept([(candidate.step, _saved_at(candidate)) for candidate in chain], now)
    doomed = [candidate for place, candidate in enumerate(chain) if place not in kept]
    others = [candidate for candidate in complete if candidate not in chain]
    if len(chain) >= MIN_KEPT and all(other.step < newest.step for other in others):
        doomed += [other for other in others if not keep.is_young(_saved_at(other), now)]
    return sorted((candidate.name for candidate in doomed if candidate.name not in held), key=order)


def _saved_at(candidate: Candidate) -> float:
    return candidate.manifest.time if candidate.manifest else 0.0


def prune(
    run: RunDir,
    store: Store,
    attempt: int,
    keep: int | Retention,
    *,
    damaged: frozenset[str] = frozenset(),
    parents: Mapping[str, str] = MappingProxyType({}),
    now: float | None = None,
) -> Iterator[str]:
    """Remove what `prune_plan` names from one tier, yielding each name once it is gone.

    `damaged` ones are neither counted nor removed, what is under way to S3 stays until it is there, and what other runs
    refer to stays on both tiers. The fence is checked before each removal: raises FencedError; StoreUnreadableError
    where the tier, or who refers to it, cannot be read.
    """
    keep = as_retention(keep)
    if not keep.removes:
        return
    verdicts = {name: look(store, name) for name in store.names()}
    complete = [
        Candidate(name=name, attempt=order(name)[0], step=order(name)[1], verdicts={store.tier: verdict})
        for name, verdict in verdicts.items()
        if name not in damaged and verdict.ok
    ]
    # a damaged one still says what it came from, else those before it would pass for another lineage
    said = {name: verdict.manifest.parent or "" for name, verdict in verdicts.items() if verdict.manifest}
    at = time.time() if now is None else now
    for name in prune_plan(complete, keep, {**parents, **said}, now=at, held=referred(run)):
        if store.tier == "posix" and name == marked(run, attempt):
            continue
        check_fence(run, attempt)
        with removing(run, name) as may:
            if may:
                store.remove(name)
        if may:
            yield name


def clear_unfinished(run: RunDir, store: Store, attempt: int, events: Iterable[Event]) -> Iterator[str]:
    """Remove what older attempts began to save and never finished, yielding each name once it is gone.

    The fence makes sure that nobody finishes it any more. What the ledger once called complete stays: it is evidence.
    """
    told = {
        str(event.fields.get("name", "")) for event in events if event.event in {"committed", "mirrored", "resumed"}
    }
    for name in store.names():
        if order(name)[0] < attempt and name not in told and store.manifest(name) is None:
            check_fence(run, attempt)
            store.remove(name)
            yield name


def rejected(events: Iterable[Event]) -> frozenset[str]:
    """Return the names that the ranks found damaged."""
    return frozenset(str(event.fields.get("name", "")) for event in events if event.event == "rejected")


def unsound_copies(events: Iterable[Event]) -> dict[tuple[str, str], str]:
    """Return the copies (name, tier) that the ranks found damaged, and why, unless they were written again since.

    A `held` event ends it: the owner, who let the job start again, may have brought the bytes back.
    """
    found: dict[tuple[str, str], str] = {}
    for event in events:
        name, tier = str(event.fields.get("name", "")), str(event.fields.get("tier", ""))
        if event.event == "rejected":
            found[name, tier] = str(event.fields.get("why", ""))
        elif event.event == "held":
            found.clear()
        elif event.event in {"committed", "resumed"}:
            found.pop((name, "posix"), None)
        if event.event in {"mirrored", "resumed"}:
            found.pop((name, "s3"), None)
    return found
