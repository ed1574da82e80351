"""`pctool stop JOB [--requeue]`: let the gang save, then end the job or let it go on in its next attempt."""

from __future__ import annotations

import argparse
import getpass
import os
import sys


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="JOB|RUN", help="a job id (123, 123_4), or a run directory")
    parser.add_argument("--requeue", action="store_true", help="go on in the next attempt instead of ending")


def run(args: argparse.Namespace) -> int:
    """Ask for the stop and say what will happen."""
    from pctool.job.find import find_run, jobs_file
    from pctool.job.stop import request_stop

    found = find_run(args.job, jobs=jobs_file(os.environ))
    stopping = request_stop(found, who=getpass.getuser(), requeue=args.requeue)
    then = "is requeued" if stopping.requeue else "ends"
    print(f"job {stopping.job_id} saves and then {then} (attempt {stopping.attempt})")
    if stopping.again:
        print("pctool stop: it was asked before; `pctool status` tells how far it is", file=sys.stderr)
    if not stopping.follows:
        print(
            "pctool stop: its script has not called pctool.train so far and has no --stop-signal; should it never do, "
            f"it does not follow: `scancel {stopping.job_id}` ends it without a save",
            file=sys.stderr,
        )
    if stopping.slow:
        print(
            f"pctool stop: the batch script could not be woken, so this may take a minute: {stopping.slow}",
            file=sys.stderr,
        )
    return 0
