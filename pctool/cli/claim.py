"""`pctool claim RUN`: what the batch script runs first. Prints the exports of the attempt, or holds the job."""

from __future__ import annotations

import argparse
import os
import sys


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("--store", metavar="URL", help="where checkpoints are mirrored (default: PCTOOL_STORE)")
    parser.add_argument(
        "--max-stalled",
        type=int,
        default=3,
        metavar="N",
        help="hold the job after N attempts in a row without a new complete checkpoint (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Claim, print the exports on stdout and one line on stderr. Exits 86 if the job was held."""
    from pctool.job.claim import claim_attempt, start_from
    from pctool.job.hold import Held, tell
    from pctool.run import env

    start = start_from(
        os.environ, run_dir=args.run, store=args.store or os.environ.get(env.STORE), max_stalled=args.max_stalled
    )
    claimed = claim_attempt(start)
    if isinstance(claimed, Held):
        tell(f"pctool claim: held ({claimed.rule}): {claimed.why}")
        tell(f"  -> {claimed.advice(start.label, start.run)}")
        return claimed.code
    point = claimed.resume
    goes_on = f"resumes from {point.name} (step {point.step}, {point.tier})" if point else "starts at step 0"
    tell(f"pctool claim: attempt {claimed.attempt} of {claimed.run.path} {goes_on}")
    sys.stdout.write(claimed.exports())
    return 0
