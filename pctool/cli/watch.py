"""`pctool watch`: look for a spot notice every 2 s, as a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from pctool.aws.imds import DEFAULT_ENDPOINT, Imds
from pctool.node.naming import drain, node_name
from pctool.node.notice_file import DEFAULT_PATH, Sighting
from pctool.node.watch import POLL_S, Looker, NodeWatch, check_poll
from pctool.run.env import IMDS


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--node", help="the node's name (default: SLURMD_NODENAME, else what Slurm calls this host)")
    parser.add_argument(
        "--drain", action="store_true", help="at a notice drain the node, and keep the notice file (for root)"
    )
    parser.add_argument(
        "--notice-file", type=Path, help=f"keep this file for the processes of the node (with --drain: {DEFAULT_PATH})"
    )
    parser.add_argument("--poll-s", type=float, default=POLL_S, help="seconds between looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="look once and print what is there; exit 3 if IMDS fails")


def run(args: argparse.Namespace) -> int:
    """Watch until SIGTERM or SIGINT. News go to stdout, one JSON object a line; the rest to stderr."""
    check_poll(args.poll_s)
    imds = Imds(os.environ.get(IMDS, DEFAULT_ENDPOINT))
    node = args.node or node_name(os.environ)
    if args.once:
        looker = Looker(node=node, imds=imds, notice_file=None)
        _report(looker.look())
        if looker.failure is not None:
            raise looker.failure
        return 0
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put is safe in a signal handler
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _frame: ended.put(number))
    watch = NodeWatch(
        node=node,
        imds=imds,
        notice_file=args.notice_file or (DEFAULT_PATH if args.drain else None),
        drain=drain if args.drain else None,
        report=_report,
        log=lambda text: print(f"pctool watch[{node}]: {text}", file=sys.stderr, flush=True),
    )
    while True:
        watch.look()
        try:
            ended.get(timeout=args.poll_s)
        except queue.Empty:
            continue
        return 0


def _report(sighting: Sighting) -> None:
    print(json.dumps(asdict(sighting)), flush=True)
