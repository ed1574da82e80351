"""`pctool submit`: submit a job, or a batch script as it stands, or print what would be done."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pctool.cli.jobflags import (
    add_cluster_argument,
    add_job_arguments,
    cluster_from_args,
    print_notes,
    spec_from_args,
)

if TYPE_CHECKING:
    from pctool.job.submitted import SubmittedJob

TAKES_COMMAND = True


def run_instead(argv: Sequence[str]) -> int | None:
    """Submit a batch script where one is named, by sbatch's own command line; None for a job of pctool's."""
    from pctool.cli.submit_script import has_batch_script, run_script

    return run_script(argv) if has_batch_script(argv) else None


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser)
    parser.usage = (
        f"{parser.prog} [FLAGS] JOB.toml | [FLAGS] -- TRAIN.py [ARGUMENTS]\n"
        f"       {parser.prog} [SBATCH OPTIONS] SCRIPT.sh [ARGUMENTS]"
    )
    parser.description = (
        f"{parser.description} A batch script is submitted as it stands, once its directives are checked: then the\n"
        "options are sbatch's own, and --run-dir, --dry-run, --json, and --force, which lets sbatch judge wrong ones."
    )
    add_cluster_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--parsable", action="store_true", help="print the job id alone, as sbatch does")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Submit the job, or print its plan."""
    from pctool.job.plan import plan_text
    from pctool.job.submit import execute, plan_submission, refuse_run_in_use

    plan = plan_submission(spec_from_args(args), cluster=cluster_from_args(args), dry=args.dry_run)
    if args.dry_run:
        print_notes(plan.warnings)
        print(plan_text(plan, as_json=args.json))
        return 0
    refuse_run_in_use(plan.spec)
    job = execute(plan)
    print_notes(job.notes)
    _report(job, args)
    return 0


def _report(job: SubmittedJob, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"job_id": job.job_id, "run_dir": job.run_dir, "output": job.output}))
    elif args.parsable:
        print(job.job_id)
    else:
        print(f"Submitted batch job {job.job_id}")
        print(f"run directory: {job.run_dir}\nfollow it with `pctool logs -f {job.job_id}`", file=sys.stderr)
