"""`pctool attempts JOB|RUN`: what happened in each attempt."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from pctool.units import format_duration

if TYPE_CHECKING:
    from pctool.job.attempts import AttemptRow


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="JOB|RUN", help="a job id (123, 123_4), or a run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print one line an attempt."""
    from pctool.cli.table import print_table
    from pctool.job.attempts import PHASES, as_json, attempts_of
    from pctool.job.find import find_run, jobs_file

    found = find_run(args.job, jobs=jobs_file(os.environ))
    table = attempts_of(found.run, alive=found.alive)
    if args.json:
        print(json.dumps(as_json(table), indent=2))
        return 0
    headers = ["attempt", "job", "restart", "nodes", "cause", "first step", "last step", "lost", *PHASES, "why"]
    print_table(headers, [_cells(row) for row in table])
    return 0


def _cells(row: AttemptRow) -> list[str]:
    numbers = (row.first_step, row.last_step, row.lost_steps)
    return [
        str(row.attempt),
        row.job_id or "-",
        _or_dash(row.restart),
        _nodes(row.nodes),
        row.cause,
        *(_or_dash(number) for number in numbers),
        *("-" if seconds is None else format_duration(seconds) for seconds in row.phases.values()),
        row.why,
    ]


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _nodes(nodes: tuple[str, ...]) -> str:
    return ",".join(nodes) if len(nodes) <= 2 else f"{nodes[0]} +{len(nodes) - 1}"
