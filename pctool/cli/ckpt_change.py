"""`pctool ckpt prune`, `mirror` and `restore`: what changes checkpoints, while no job works on the run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pctool.cli.ckpt_common import Meter, target_of
from pctool.errors import UsageError
from pctool.units import format_bytes

if TYPE_CHECKING:
    from pctool.checkpoint.target import Target
    from pctool.checkpoint.tidy import Removal
    from pctool.run.layout import RunDir


def prune(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint that is (or would be) removed."""
    from pctool.checkpoint import tidy
    from pctool.checkpoint.retention import Retention
    from pctool.checkpoint.stores import order
    from pctool.job.idle import check_idle

    keep = Retention(keep=args.keep, keep_for_s=args.keep_for, keep_every=args.keep_every)
    if not keep.removes:
        raise UsageError("nothing says what may be removed", fix="give --keep N or --keep-for AGE")
    target = target_of(args.run, args)
    run = _run_of(target, args.run)
    attempt = -1 if args.dry_run else check_idle(run)
    plan = tidy.plan(target, keep)
    word = "would remove" if args.dry_run else "removed"
    removed: list[Removal] = []
    for removal in plan.removals if args.dry_run else tidy.remove(target, plan, attempt):
        removed.append(removal)
        if not args.json:
            step = order(removal.name)[1]
            print(
                f"{word} {removal.name}  {removal.store.tier}  step {step}  {format_bytes(removal.bytes)}", flush=True
            )
    if args.json:
        print(json.dumps(tidy.as_json(plan, removed, dry_run=args.dry_run), indent=2))
        return 0
    for tier, kept in plan.kept.items():
        print(f"kept on {tier}: {', '.join(kept) or 'none'}")
    print(f"{word} {len(removed)}, {format_bytes(sum(removal.bytes for removal in removed))}")
    return 0


def mirror(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint that was copied. Exits 1 if one is not on S3 yet."""
    from pctool.checkpoint.mirrornow import as_json, mirror_now
    from pctool.job.idle import check_idle

    target = target_of(args.run, args)
    done = mirror_now(target, check_idle(_run_of(target, args.run)))
    if args.json:
        print(json.dumps(as_json(done), indent=2))
    else:
        for name, size in done.copied.items():
            print(f"mirrored {name}  {format_bytes(size)}")
        print("all that is complete is on S3" if done.complete else f"not on S3: {', '.join(done.left) or '?'}")
    if done.why:
        print(f"the last reason: {done.why}", file=sys.stderr)
    return 0 if done.complete else 1


def restore(args: argparse.Namespace) -> int:
    """Bring one checkpoint and say where it is."""
    from pctool.checkpoint import fetch
    from pctool.checkpoint.target import S3_SCHEME
    from pctool.job.idle import check_idle
    from pctool.run.layout import RunDir

    source = target_of(args.source, args)
    from_address = args.source.startswith(S3_SCHEME)
    if from_address != (args.run is not None) or source.store is None:
        raise UsageError(
            "what is to be restored where?",
            fix="write `pctool ckpt restore s3://bucket/prefix/NAME RUN`, or `pctool ckpt restore RUN --store URL`",
        )
    run = RunDir(Path(args.run).absolute()) if from_address else _run_of(source, args.source)
    check_idle(run)
    name = fetch.choose(source, None if from_address else run)
    done = fetch.fetch(
        source.stores[-1],
        name,
        run.checkpoints,
        tell=lambda manifest: Meter(f"restoring {name}", manifest.bytes, asked=args.progress),
    )
    if args.json:
        print(json.dumps(fetch.as_json(done), indent=2))
    else:
        print(
            f"{done.folder} is complete: {len(done.fetched)} of {len(done.manifest.files)} files were fetched, "
            f"{format_bytes(done.bytes)}"
        )
    return 0


def _run_of(target: Target, text: str) -> RunDir:
    if target.run is None:
        raise UsageError(f"{text} is no run directory", fix="give the run directory, or a job id")
    return target.run
