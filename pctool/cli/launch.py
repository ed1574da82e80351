"""`pctool launch`: started by srun, one a node."""

from __future__ import annotations

import argparse
import os
import sys

from pctool.errors import UsageError
from pctool.node.config import read_config
from pctool.node.launch import Launch
from pctool.node.refusal import record_refusal
from pctool.node.watch import POLL_S, check_poll


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="R", help="ranks on this node (default: 1)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has torch (default: this one)")
    parser.add_argument(
        "--stop-signal", metavar="SIG", help="pass a stop on to the rank processes as this signal, e.g. USR1"
    )
    parser.add_argument("--poll-s", type=float, default=POLL_S, help="seconds between looks for a notice (default: 2)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENT..., as torchrun takes it")


def run(args: argparse.Namespace) -> int:
    """Run until the gang has ended."""
    try:
        launch = _prepare(args)
    except UsageError as error:
        record_refusal(os.environ, error)  # without a record the job would be requeued for nothing
        raise
    return launch.run()


def _prepare(args: argparse.Namespace) -> Launch:
    """Return the launch that flags and environment describe. Raise UsageError."""
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise UsageError("no training script", fix="name it after --, as in `pctool launch -- train.py --lr 3e-4`")
    if args.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node} starts no rank", fix="give 1 or more")
    config = read_config(
        os.environ,
        per_node=args.nproc_per_node,
        python=args.python,
        script=script,
        stop_signal=args.stop_signal,
        poll_s=check_poll(args.poll_s),
    )
    return Launch(config, emit=lambda text: print(f"pctool launch[{config.name}]: {text}", file=sys.stderr, flush=True))
