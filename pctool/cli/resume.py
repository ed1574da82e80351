"""`pctool resume JOB|RUN --from STEP`: accept that the run goes on from a lower step."""

from __future__ import annotations

import argparse
import os
import sys

from pctool.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="JOB|RUN", help="a job id (123, 123_4), or a run directory")
    parser.add_argument(
        "--from", dest="step", type=int, required=True, metavar="STEP", help="the step to go on from; 0: a new start"
    )
    parser.add_argument("--store", metavar="URL", help="where checkpoints are mirrored (default: as in job.toml)")


def run(args: argparse.Namespace) -> int:
    """Write it to the ledger and say how the job is let go on."""
    from pctool.job.find import find_run, jobs_file
    from pctool.job.resume import accept
    from pctool.job.runspec import store_of

    if args.step < 0:
        raise UsageError(f"--from {args.step}: steps are counted from 0", fix="see `pctool attempts` for the steps")
    found = find_run(args.job, jobs=jobs_file(os.environ))
    accepted = accept(found, step=args.step, store=args.store or store_of(found.run))
    where = accepted.name or "the beginning"
    print(f"{found.run.path} goes on from {where} (step {accepted.step}): {accepted.how}")
    if accepted.left:
        print(f"it turns away from {', '.join(accepted.left)}; they stay where they are", file=sys.stderr)
    return 0
