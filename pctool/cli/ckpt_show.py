"""`pctool ckpt ls` and `verify`: nothing is changed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from pctool.cli.ckpt_common import Meter, target_of
from pctool.units import format_bytes, format_duration

if TYPE_CHECKING:
    from pctool.checkpoint.listing import Row
    from pctool.checkpoint.manifest import Manifest
    from pctool.checkpoint.stores import Store
    from pctool.checkpoint.verify import Report


def ls(args: argparse.Namespace) -> int:
    """Print a line a checkpoint."""
    from pctool.checkpoint.listing import as_json, list_checkpoints
    from pctool.cli.table import print_table

    target = target_of(args.target, args)
    listing = list_checkpoints(target)
    now = time.time()
    if args.json:
        print(json.dumps(as_json(target, listing, now), indent=2))
        return 0
    if listing.rows:
        headers = ["name", "attempt", "step", "state", "where", "bytes", "files", "world", "age", "parent", "note"]
        print_table(headers, [_cells(row, now) for row in listing.rows])
    else:
        print(f"no checkpoints yet in {target.where}", file=sys.stderr)
    if listing.held:
        print(f"the next attempt would be held: {listing.held}", file=sys.stderr)
    return 0


def _cells(row: Row, now: float) -> list[str]:
    manifest = row.manifest
    return [
        row.name,
        str(row.attempt),
        str(row.step),
        "complete" if row.tiers else "not complete",
        "+".join(row.tiers) or "-",
        format_bytes(max(copy.bytes for copy in row.copies.values())),
        str(max(copy.files for copy in row.copies.values())),
        str(manifest.world_size) if manifest else "-",
        format_duration(max(now - manifest.time, 0)) if manifest and manifest.time else "-",
        (manifest.parent or "-") if manifest else "-",
        "; ".join([*(["resumed next"] if row.resume else []), *row.notes]),
    ]


def verify(args: argparse.Namespace) -> int:
    """Print a line a checkpoint and tier, and one for each file that is wrong. Exits 1 if one is."""
    from pctool.checkpoint.verify import as_json
    from pctool.checkpoint.verify import verify as check

    def tell(store: Store, manifest: Manifest) -> Meter:
        from pctool.run.layout import checkpoint_name

        name = checkpoint_name(manifest.attempt, manifest.step)
        return Meter(f"{store.tier} {name}", manifest.bytes, asked=args.progress)

    reports = check(target_of(args.target, args), every=args.every, read=args.read, tell=tell)
    if args.json:
        print(json.dumps(as_json(reports), indent=2))
    else:
        for report in reports:
            _print(report)
    return 0 if all(report.ok for report in reports) else 1


def _print(report: Report) -> None:
    how = "every byte read" if report.read else "S3's checksums compared"
    rate = f", {format_bytes(report.bytes / report.seconds)}/s" if report.read and report.seconds else ""
    size = f"{report.files} files, {format_bytes(report.bytes)}: {how} in {format_duration(report.seconds)}{rate}"
    verdict = f"{len(report.findings)} wrong" if not report.ok else "good" if report.files else "not checked"
    print(f"{report.name}  {report.tier}  {verdict}{f'  ({size})' if report.files else ''}")
    for finding in report.findings:
        print(f"  {finding.file}: {finding.what}")
    for note in report.notes:
        print(f"  note: {note}")
