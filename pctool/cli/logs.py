"""`pctool logs [-f] JOB`: rank 0's log, across attempts, or the output of a batch script submitted as it stands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from pctool.errors import SlurmError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="JOB|RUN", help="a job id (123, 123_4), or a run directory")
    parser.add_argument("-f", "--follow", action="store_true", help="go on, over requeues, until the job is over")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines of what is there")
    parser.add_argument("-r", "--rank", type=int, default=0, metavar="R", help="another rank (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Copy the logs to stdout."""
    from pctool.job.find import find_run, is_alive, jobs_file
    from pctool.job.logs import follow, read_logs
    from pctool.job.output import follow_output, output_of, read_output

    if args.lines is not None and args.lines < 0:
        raise UsageError(
            f"--lines {args.lines}: there are no fewer than 0", fix="give how many of the last lines to show"
        )
    found = find_run(args.job, jobs=jobs_file(os.environ))
    silent = _silent(str(found.run.path))
    output = output_of(found)
    if output is not None and args.follow:
        pieces = follow_output(output, alive=lambda: is_alive(found, silent), last=args.lines)
    elif output is not None:
        pieces = read_output(output, last=args.lines)
    elif args.follow:
        pieces = follow(found.run, rank=args.rank, alive=lambda: is_alive(found, silent), last=args.lines)
    else:
        pieces = read_logs(found.run, rank=args.rank, last=args.lines)
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    return 0


def _silent(run: str) -> Callable[[SlurmError], None]:
    """Return what says once that Slurm does not answer while a log is followed."""
    told: list[SlurmError] = []

    def tell(error: SlurmError) -> None:
        if not told:
            print(
                f"pctool logs: still watching {run} (Ctrl-C ends); whether the job lives is unknown: {error}",
                file=sys.stderr,
            )
        told.append(error)

    return tell
