"""`pctool nudge [JOB ...] [--watch]`: start one's own requeued jobs now instead of after Slurm's delay."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pctool.units import format_duration

if TYPE_CHECKING:
    from pctool.job.nudge import Nudge


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="job ids (none: all your jobs of pctool)")
    parser.add_argument("-w", "--watch", action="store_true", help="go on until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Nudge once or for ever; a line for each job. Exits 3 if Slurm refused one, 1 if one is better left alone."""
    from pctool.job.nudge import nudge, watch

    if args.watch:
        print("watching for requeued jobs; end with Ctrl-C", file=sys.stderr)
        return _tell(watch(args.jobs))
    done = nudge(args.jobs)
    if not done:
        print("no requeued job waits", file=sys.stderr)
    return _tell(done)


def _tell(done: Iterable[Nudge]) -> int:
    code = 0
    for one in done:
        if one.doomed is not None:
            until = time.strftime("%H:%M:%S", time.localtime(one.doomed.until))
            print(
                f"{one.job.label}: not nudged: it might get {one.doomed.node} again, "
                f"which has a spot notice until {until}",
                file=sys.stderr,
                flush=True,
            )
            code = max(code, 1)
        elif one.error is None:
            saved = format_duration(one.saved_s)
            print(f"{one.job.label}: starts now instead of in {saved} (restart {one.job.restarts})", flush=True)
        else:
            print(f"{one.job.label}: {one.error}", file=sys.stderr, flush=True)
            code = 3
    return code
