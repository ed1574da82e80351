"""`pctool ckpt export`: one file of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from pctool.cli.ckpt_common import Meter, target_of
from pctool.units import format_bytes

if TYPE_CHECKING:
    from pctool.checkpoint.manifest import Manifest


def export(args: argparse.Namespace) -> int:
    """Write the file and say what is in it."""
    from pctool.checkpoint.export import Options, as_json, check_out, export_target

    check_out(args.out, force=args.force)  # before anything is asked that may take long
    options = Options(only=args.only, dtype=args.dtype, force=args.force)

    def tell(what: str, manifest: Manifest) -> Meter:
        return Meter(what, manifest.bytes, asked=args.progress)

    name, done = export_target(target_of(args.target, args), args.out, options, tell)
    if args.json:
        print(json.dumps(as_json(name, done), indent=2))
        return 0
    print(f"{done.path}: {done.tensors} tensors of {name}, {format_bytes(done.bytes)}")
    for entry, why in sorted(done.left_out.items()):
        print(f"left out: {entry}: {why}", file=sys.stderr)
    return 0
