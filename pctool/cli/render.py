"""`pctool render`: print the batch script of a job."""

from __future__ import annotations

import argparse
import sys

from pctool.cli.jobflags import (
    add_cluster_argument,
    add_job_arguments,
    cluster_from_args,
    print_notes,
    spec_from_args,
)

TAKES_COMMAND = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser)
    add_cluster_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the script; warnings go to standard error."""
    from pctool.job.plan import make_plan

    plan = make_plan(spec_from_args(args), view=cluster_from_args(args))
    print_notes(plan.warnings)
    sys.stdout.write(plan.script)
    return 0
