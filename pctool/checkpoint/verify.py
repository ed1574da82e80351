"""Prove a checkpoint: every byte of every file against its manifest, and that it hangs together.

On the shared file system the bytes are read. On S3 the full-object CRC64-NVME that S3 keeps, which it checked when the
object came, is compared; with `read` the bytes are downloaded instead, as they are where S3 keeps no such sum.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pctool import crc64
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.stores import PosixStore, Store, order, unreadable
from pctool.checkpoint.target import Target, pick
from pctool.run.ledger import Event

if TYPE_CHECKING:
    from pctool.checkpoint.s3store import S3Store

# awscrt's CRC holds the GIL, so threads share one core for it (8.9 GiB/s); what they win is reading side by side,
# which on a network file system is the slower half. Processes were no faster on two cores, and take time to start.
FILES_AT_ONCE = 8
HEADS_AT_ONCE = 16
_CHUNK = 8 << 20

Tell = Callable[[int], None]  # is called with the number of bytes that were just checked, from any thread


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One file of a checkpoint, and what is wrong with it."""

    file: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One checkpoint on one tier. `notes` name what is there beside it: nobody reads that, so it harms nothing."""

    name: str
    tier: str
    where: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    read: bool = True  # whether the bytes themselves were read, all of them

    @property
    def ok(self) -> bool:
        """Return whether every byte is as the manifest says."""
        return not self.findings


def verify(
    target: Target, *, every: bool = False, read: bool = False, tell: Callable[[Store, mf.Manifest], Tell] | None = None
) -> list[Report]:
    """Check the checkpoint that is named, every one, or the newest that was finished; a report for each tier it is on.

    `tell` is called before each copy is checked. Raises NotFoundError where there is none, StoreUnreadableError or
    AwsError where a tier cannot be read.
    """
    listed = target.names()
    names = pick(target, listed)
    reports = []
    for name in names if every or target.name else _newest(target, names, listed):
        here = [store for store in target.stores if name in listed[store.tier]]
        reports += _verify_copies(here, name, read, tell, named=target.name is not None)
    told = _told(target.events())
    return [_excuse(one, told) if every else one for one in reports]


def verify_copy(store: Store, name: str, *, read: bool = True, tell: Tell | None = None) -> Report:
    """Check one checkpoint on one tier."""
    began = time.monotonic()
    data, sizes = store.manifest(name), store.sizes(name)
    verdict = mf.judge(data, sizes, name=name)
    manifest = verdict.manifest
    if manifest is None:
        return _report(store, name, began, [Finding(file=mf.NAME, what=verdict.why.removeprefix(f"{mf.NAME}: "))])
    faults = mf.size_faults(manifest, sizes)
    whole = [file for file in sorted(manifest.files) if file not in faults]
    kept = {} if _on_disk(store) else kept_sums(store, name, whole)
    to_read = whole if _on_disk(store) or read else [file for file in whole if kept[file] is None]
    faults |= _sum_faults(manifest, {file: sum_ for file, sum_ in kept.items() if sum_ is not None})
    faults |= _sum_faults(manifest, read_sums(store, name, manifest, to_read, tell or _silent))
    if faults and store.manifest(name) != data:
        return _report(store, name, began, [], ["it was removed, or saved anew, while it was checked"])
    findings = [Finding(file=file, what=what) for file, what in sorted(faults.items())]
    extra = sorted(sizes.keys() - manifest.files.keys() - {mf.NAME})
    notes = [_extra_note(store, name, file, sizes[file], manifest) for file in extra]
    return _report(store, name, began, findings, notes, manifest, read=len(to_read) == len(whole))


def read_sums(store: Store, name: str, manifest: mf.Manifest, files: Iterable[str], tell: Tell) -> dict[str, str]:
    """Return the CRC64-NVME of the bytes of each file, or in its place what the system said where it is unreadable."""
    sizes = {file: manifest.files[file].size for file in files}
    if not _on_disk(store):
        from pctool.checkpoint.s3read import sums

        return sums(_as_s3(store), name, sizes, tell)
    assert isinstance(store, PosixStore)
    folder = store.folder / name
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        largest_first = sorted(sizes, key=lambda file: -sizes[file])
        try:
            found = pool.map(lambda file: sum_of_file(folder / file, tell), largest_first)
            return dict(zip(largest_first, found, strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def sum_of_file(path: Path, tell: Tell) -> str:
    """Return a file's CRC64-NVME; a bad block is told in its place. Raise StoreUnreadableError for any other error."""
    buffer = memoryview(bytearray(_CHUNK))
    update, value = crc64.function(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                value = update(buffer[:count], value)
                tell(count)
    except FileNotFoundError:
        return "missing"  # it was there a moment ago: pruned
    except OSError as error:
        if error.errno != errno.EIO:
            raise unreadable(path, error) from error
        return f"cannot be read: {os.strerror(errno.EIO)}"
    return crc64.text(value)


def kept_sums(store: Store, name: str, files: Iterable[str]) -> dict[str, str | None]:
    """Return the full-object CRC64-NVME that S3 keeps of each file, None where it keeps none."""
    files, remote = list(files), _as_s3(store)

    def kept(file: str) -> str | None:
        found = remote.s3.stored(f"{remote.root}/{name}/{file}")
        return found.crc64nvme if found is not None else "missing"

    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        return dict(zip(files, pool.map(kept, files), strict=True))


def as_json(reports: Iterable[Report]) -> dict[str, Any]:
    """Return the stable JSON shape of `pctool ckpt verify --json`."""
    return {"ok": all(report.ok for report in reports), "checkpoints": [_report_json(report) for report in reports]}


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        "tier": report.tier,
        "where": report.where,
        "ok": report.ok,
        "read": report.read,
        "files": report.files,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "findings": [{"file": finding.file, "what": finding.what} for finding in report.findings],
        "notes": list(report.notes),
    }


def _verify_copies(
    stores: Iterable[Store],
    name: str,
    read: bool,
    tell: Callable[[Store, mf.Manifest], Tell] | None,
    *,
    named: bool,
) -> list[Report]:
    reports: list[Report] = []
    nearest: bytes | None = None
    for store in stores:
        data = store.manifest(name)
        manifest = mf.judge(data, {}, name=name).manifest
        meter = tell(store, manifest) if tell and manifest else None
        report = verify_copy(store, name, read=read, tell=meter)
        if data is not None and nearest is not None and data != nearest:
            other = Finding(file=mf.NAME, what="another checkpoint of this name than on the tier before")
            report = replace(report, findings=(other, *report.findings))
        nearest = nearest or data
        reports.append(report)
    if not named and any(report.findings != (_UNFINISHED,) for report in reports):
        # it is complete on one tier and under way to the other: `pctool ckpt mirror` tells of that
        return [_as_note(report) for report in reports]
    return reports


_UNFINISHED = Finding(file=mf.NAME, what=mf.judge(None, {}).why)


def _as_note(report: Report) -> Report:
    if report.findings != (_UNFINISHED,):
        return report
    return replace(report, findings=(), notes=(f"not finished here: {_UNFINISHED.what}",))


def _excuse(report: Report, told: Mapping[str, set[str]]) -> Report:
    """Turn `never finished` into a note, unless the ledger says that it was: a torn save deceives nobody."""
    return report if report.name in told.get(report.tier, set()) else _as_note(report)


def _told(events: Iterable[Event]) -> dict[str, set[str]]:
    """Return which checkpoints the ledger says were complete, by tier."""
    told: dict[str, set[str]] = {"posix": set(), "s3": set()}
    for event in events:
        name = str(event.fields.get("name", ""))
        if event.event in {"committed", "resumed"}:
            told["posix"].add(name)
        if event.event == "mirrored":
            told["s3"].add(name)
    return told


def _newest(target: Target, names: list[str], listed: Mapping[str, list[str]]) -> list[str]:
    """Return the newest that has a manifest on some tier; where none has, the newest."""
    for name in sorted(names, key=order, reverse=True):
        stores = (store for store in target.stores if name in listed[store.tier])
        if any(store.manifest(name) is not None for store in stores):
            return [name]
    return names[:1]


def _sum_faults(manifest: mf.Manifest, sums: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with files by their sums; a file that could not be read has what was said in its place."""
    wrong = {file: found for file, found in sums.items() if found != manifest.files[file].crc64nvme}
    return {file: _fault(found, manifest.files[file].crc64nvme) for file, found in wrong.items()}


def _fault(found: str, expected: str) -> str:
    if found == "missing" or found.startswith("cannot be read"):
        return found
    return f"CRC64-NVME {found} where the manifest says {expected}"


def _extra_note(store: Store, name: str, file: str, size: int, manifest: mf.Manifest) -> str:
    """Say of a file that the manifest does not name whether it is a duplicate of one that it does."""
    alike = {entry.crc64nvme: other for other, entry in manifest.files.items() if entry.size == size}
    found: str | None = None
    if alike and _on_disk(store):
        assert isinstance(store, PosixStore)
        found = sum_of_file(store.folder / name / file, _silent)
    elif alike:
        found = kept_sums(store, name, [file])[file]
    of = f", a duplicate of {alike[found]}" if found in alike else ""
    return f"{file}: {size} bytes that the manifest does not name{of}"


def _report(
    store: Store,
    name: str,
    began: float,
    findings: Iterable[Finding],
    notes: Iterable[str] = (),
    manifest: mf.Manifest | None = None,
    *,
    read: bool = False,
) -> Report:
    return Report(
        name=name,
        tier=store.tier,
        where=f"{store.where}/{name}",
        findings=tuple(findings),
        notes=tuple(notes),
        files=len(manifest.files) if manifest else 0,
        bytes=manifest.bytes if manifest else 0,
        seconds=round(time.monotonic() - began, 3),
        read=read,
    )


def _on_disk(store: Store) -> bool:
    return store.tier == "posix"


def _as_s3(store: Store) -> S3Store:
    from pctool.checkpoint.s3store import S3Store

    assert isinstance(store, S3Store)
    return store


def _silent(_: int) -> None:
    pass
