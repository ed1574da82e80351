"""`pctool decide RUN`: what the batch script runs last. Its exit code is the job's."""

from __future__ import annotations

import argparse
import os


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument(
        "--srun-code", type=int, metavar="CODE", help="what srun returned; it is written down, never trusted"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="the attempt that ended (default: PCTOOL_ATTEMPT)")
    parser.add_argument("--no-requeue", action="store_true", help="never requeue, whatever job.toml says")


def run(args: argparse.Namespace) -> int:
    """Decide, say so on stderr, and return the code to exit with."""
    from pctool.job.decide import conclude, ending_from
    from pctool.job.hold import tell

    ending = ending_from(
        os.environ,
        run_dir=args.run,
        attempt=args.attempt,
        srun_code=args.srun_code,
        may_requeue=not args.no_requeue,
    )
    verdict = conclude(ending)
    decision = verdict.decision
    srun = "" if args.srun_code is None else f" (srun returned {args.srun_code})"
    what = {"none": "no requeue", "exit-code": "requeue by exit code", "scontrol": "requeue by scontrol"}[verdict.means]
    line = f"attempt {ending.attempt}: {decision.cause}, {what}, exit {decision.code}: {decision.why}{srun}"
    tell(f"pctool decide: {line}")
    return decision.code
