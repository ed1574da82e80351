"""`pctool doctor`: check Slurm, storage, S3 and a node before a job needs them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pctool.errors import UsageError

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-p", "--partition", metavar="PART", help="the partition to check (default: the cluster's)")
    parser.add_argument("--run-dir", metavar="DIR", help="check that this folder is shared with the nodes")
    parser.add_argument("--store", metavar="URL", help="check the rights on this S3 address (s3://bucket/prefix)")
    parser.add_argument("--python", metavar="EXE", help="the interpreter that has torch (default: pctool's own)")
    parser.add_argument("--wait", type=int, default=60, metavar="S", help="srun's --wait (default: %(default)s)")
    parser.add_argument("--no-node", action="store_true", help="start nothing on a node (no instance boots)")
    parser.add_argument(
        "--node-timeout", type=float, default=900.0, metavar="S", help="how long a node may take (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print one line a check. Exits 1 if any failed."""
    from pctool.cli.table import print_table
    from pctool.job.doctor import Options, as_json, examine, verdict

    if args.no_node and args.run_dir:
        raise UsageError("--run-dir needs a node to look from", fix="leave out --no-node")
    checks = examine(
        Options(
            partition=args.partition,
            run_dir=Path(args.run_dir).absolute() if args.run_dir else None,
            store=args.store,
            python=args.python or sys.executable,
            wait=args.wait,
            node=not args.no_node,
            node_timeout_s=args.node_timeout,
        )
    )
    if args.json:
        print(json.dumps(as_json(checks), indent=2))
    else:
        rows = [[check.name, check.status, check.found, check.advice] for check in checks]
        print_table(["check", "status", "found", "what to do"], rows, styles=[_STYLES[c.status] for c in checks])
    return verdict(checks)
