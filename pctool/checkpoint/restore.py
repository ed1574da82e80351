"""Find the newest good checkpoint, on all ranks together, make it whole on the shared file system, and take it in.

Candidates are offered newest first by rank 0. Ranks prove every byte while they load; what is damaged is fetched from
the other tier if it is good there, else the checkpoint is named in the ledger and the one before is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.group import Group, RanksFailedError
from pctool.checkpoint.lineage import Candidate, ResumePoint, check_durable, own_candidates, point_of
from pctool.checkpoint.reader import DamagedFileError
from pctool.checkpoint.stores import PosixStore, Store, StoreUnreadableError, open_stores
from pctool.errors import AwsError, IncompleteError
from pctool.run.layout import RunDir, checkpoint_name, write_atomic
from pctool.run.ledger import Ledger

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Restorable(Generic[T]):
    """A checkpoint that is whole on the shared file system, every byte proven. `point.tier` says where from.

    `loaded` is what the load brought, None if nothing was to be loaded.
    """

    point: ResumePoint
    manifest: mf.Manifest
    loaded: T | None = None


class Load(Protocol[T]):
    """Load a checkpoint on this rank. Raises DamagedFileError on every rank; the files proven on the way are said."""

    def __call__(self, folder: Path, manifest: mf.Manifest, /) -> tuple[T, frozenset[str]]:
        """Return what was loaded and the names of the files of which every byte was proven."""


def find_whole(
    run: RunDir, store: str | None, group: Group, ledger: Ledger, attempt: int, load: Load[T] | None = None
) -> Restorable[T] | None:
    """Return the newest checkpoint whose every byte is good, None for a run that has none; the same on every rank.

    `load` takes it in; its bytes are proven while they are read, and those that no rank needs besides. Raises
    BelowDurableError where it would be older than the ledger explains, ForeignCheckpointError where it would be another
    run's, StoreUnreadableError where a tier cannot be read, or one that could be listed not to the end.
    """
    try:
        return _find_whole(run, store, group, ledger, attempt, load)
    except (AwsError, RanksFailedError) as error:
        raise _not_restored(error.what, error.where) from error
    except OSError as error:
        raise _not_restored(str(error), str(run.path)) from error


def _not_restored(what: str, where: str | None) -> StoreUnreadableError:
    return StoreUnreadableError(
        f"no checkpoint could be restored: {what}",
        where=where,
        fix="see to it that the store can be read (`pctool doctor`); the next attempt tries again",
    )


def _find_whole(
    run: RunDir, store: str | None, group: Group, ledger: Ledger, attempt: int, load: Load[T] | None
) -> Restorable[T] | None:
    offers = _offers(run, store, ledger) if group.rank == 0 else iter(())
    damaged: dict[str, str] = {}
    while True:
        offer: Candidate | None = group.first(lambda: next(offers, None))
        if offer is None:
            _check_durable(run, ledger, group, None, damaged)
            return None
        whole, faults = _make_whole(offer, run, store, group, load)
        if whole is not None:
            _check_durable(run, ledger, group, whole.point, damaged)
            return whole
        damaged[offer.name] = "; ".join(f"{tier}: {why}" for tier, why in faults.items())
        if group.rank == 0:
            _reject(ledger, attempt, offer, faults)


def _check_durable(
    run: RunDir, ledger: Ledger, group: Group, point: ResumePoint | None, damaged: Mapping[str, str]
) -> None:
    group.first(lambda: check_durable(run, ledger.read(), point, damaged))


def _offers(run: RunDir, store: str | None, ledger: Ledger) -> Iterator[Candidate]:
    yield from own_candidates(run, open_stores(run, store), ledger.read())


def _reject(ledger: Ledger, attempt: int, offer: Candidate, faults: Mapping[str, str]) -> None:
    for tier, why in faults.items():
        ledger.append("rejected", attempt=attempt, name=offer.name, step=offer.step, tier=tier, why=why)


def _make_whole(
    offer: Candidate, run: RunDir, store: str | None, group: Group, load: Load[T] | None
) -> tuple[Restorable[T] | None, dict[str, str]]:
    """Take an offer in, repaired from S3 if need be; return it, or None and what is wrong, tier by tier."""
    faults = {tier: verdict.why for tier, verdict in offer.verdicts.items() if not verdict.ok}
    if offer.manifest is None:
        return None, faults
    bad = _all_bad(offer.manifest)
    if "posix" in offer.tiers:
        loaded, bad = _take_in(offer.manifest, run, group, load)
        if not bad:
            return Restorable(point=point_of(offer), manifest=offer.manifest, loaded=loaded), {}
        faults["posix"] = _listed(bad)
    if "s3" not in offer.tiers or store is None:
        return None, faults
    if offer.verdicts["s3"].manifest != offer.manifest:
        return None, {**faults, "s3": "another checkpoint of this name than on the shared file system"}
    unfetched = _fetch_shares(offer, run, store, group, sorted(bad))
    if unfetched:
        return None, {**faults, "s3": _listed(unfetched)}
    group.first(lambda: _publish(offer, run))
    loaded, bad = _take_in(offer.manifest, run, group, load)
    if bad:
        return None, {**faults, "posix": _listed(bad)}
    point = ResumePoint(name=offer.name, attempt=offer.attempt, step=offer.step, tier="s3")
    return Restorable(point=point, manifest=offer.manifest, loaded=loaded), {}


def _take_in(manifest: mf.Manifest, run: RunDir, group: Group, load: Load[T] | None) -> tuple[T | None, dict[str, str]]:
    """Load a checkpoint and prove all of it; return what was loaded, and what is wrong with any file, on every rank.

    Each rank proves what it reads, and its share of what nobody reads. Once something is wrong, all is looked at.
    """
    names = sorted(manifest.files)
    if load is None:
        return None, _check_shares(manifest, run, group, names)
    folder = run.checkpoints / checkpoint_name(manifest.attempt, manifest.step)
    try:
        loaded, mine = load(folder, manifest)
    except DamagedFileError as error:
        found = _check_shares(manifest, run, group, names)
        return None, found or {str(error.what).partition(":")[0]: f"{error.what}, and good at a second look"}
    proven = group.most([int(name in mine) for name in names])
    rest = [name for name, done in zip(names, proven, strict=True) if not done]
    return loaded, _check_shares(manifest, run, group, rest)


def _listed(bad: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(bad.items()))


def _all_bad(manifest: mf.Manifest) -> dict[str, str]:
    return dict.fromkeys(manifest.files, "not on the shared file system")


def _check_shares(manifest: mf.Manifest, run: RunDir, group: Group, names: list[str]) -> dict[str, str]:
    """Return what is wrong with any of the named files, on every rank; each rank reads its share of the bytes."""
    folder = run.checkpoints / checkpoint_name(manifest.attempt, manifest.step)
    mine = _share(manifest, names, group)
    found = group.agree("checking the checkpoint", lambda: mf.file_faults(folder, manifest, mine))
    return {name: why for faults in found for name, why in faults.items()}


def _fetch_shares(offer: Candidate, run: RunDir, store: str, group: Group, names: list[str]) -> dict[str, str]:
    """Fetch the named files from S3, each rank its share, and return what is still wrong with any of them."""
    manifest = offer.manifest
    assert manifest is not None
    folder = run.checkpoints / offer.name

    def fetch() -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        mine = _share(manifest, names, group)
        remote = open_stores(run, store)[-1]
        return {name: fault for name in mine if (fault := _fetch(remote, folder, name, manifest.files[name]))}

    found = group.agree("fetching the checkpoint from S3", fetch)
    return {name: why for faults in found for name, why in faults.items()}


def _fetch(remote: Store, folder: Path, name: str, entry: mf.FileEntry) -> str:
    """Fetch one file and return what is wrong with it, "" if nothing is; one that is good already is not fetched."""
    if not mf.file_fault(folder / name, entry):
        return ""  # an attempt before this one came so far
    try:
        remote.fetch(folder.name, name, folder / name)
    except IncompleteError as error:
        return error.what
    return mf.file_fault(folder / name, entry)


def _publish(offer: Candidate, run: RunDir) -> None:
    """Write the manifest of a checkpoint that came from S3; a damaged one is replaced."""
    assert offer.manifest is not None
    data = mf.encode(offer.manifest)
    folder = run.checkpoints / offer.name
    if PosixStore(run.checkpoints).manifest(offer.name) != data:
        write_atomic(folder / mf.NAME, data)
    verdict = mf.is_complete(folder)
    if not verdict.ok:
        raise IncompleteError(verdict.why, where=str(folder))


def _share(manifest: mf.Manifest, names: list[str], group: Group) -> list[str]:
    """Deal the files out by size, so that ranks read about as many bytes each."""
    dealt = sorted(names, key=lambda name: (-manifest.files[name].size, name))
    return dealt[group.rank :: group.world]
