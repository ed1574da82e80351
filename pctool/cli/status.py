"""`pctool status [JOB]`: attempt, step, newest durable checkpoint, and what the job waits for."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pctool.units import format_duration

if TYPE_CHECKING:
    from pctool.job.status import Status


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "job", metavar="JOB|RUN", nargs="?", help="a job id or a run directory (none: all your jobs of pctool)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print one job in lines, or all of one's own in a table."""
    from pctool.job.find import find_run, jobs_file
    from pctool.job.status import as_json, status_of, status_of_mine

    jobs = jobs_file(os.environ)
    statuses = [status_of(find_run(args.job, jobs=jobs))] if args.job else status_of_mine(jobs=jobs)
    if args.json:
        print(json.dumps({"jobs": [as_json(status) for status in statuses]}, indent=2))
    elif args.job:
        _print_lines(statuses[0])
    else:
        _print_all(statuses)
    return 0


def _print_lines(status: Status) -> None:
    lines = {
        "job": status.job_id or "none",
        "run": status.run_dir,
        "state": _state(status),
        "nodes": status.nodes,
        "attempt": "none yet" if status.attempt is None else f"{status.attempt}{_cause(status)}",
        "why": status.why or "",
        "step": _step(status),
        "checkpoint": _checkpoint(status),
        "next start": _next_start(status),
        "held": status.held or "",
        "to go on": status.advice or "",
        "note": "\n            ".join(status.notes),
    }
    for name, value in lines.items():
        if value:
            print(f"{name:<10}  {value}")


def _print_all(statuses: list[Status]) -> None:
    from pctool.cli.table import print_table

    headers = ["job", "run", "state", "attempt", "step", "checkpoint", "note"]
    print_table(headers, [_row(status) for status in statuses])


def _row(status: Status) -> list[str]:
    waits = _next_start(status)
    notes = [f"held: {status.held}" if status.held else "", f"starts {waits}" if waits else "", *status.notes]
    return [
        status.job_id or "-",
        Path(status.run_dir).name or "-",
        _state(status),
        "-" if status.attempt is None else str(status.attempt),
        _step(status) or "-",
        _checkpoint(status),
        "; ".join(note for note in notes if note),
    ]


def _state(status: Status) -> str:
    return f"{status.state} ({status.reason})" if status.reason and status.held is None else status.state


def _cause(status: Status) -> str:
    return f" (ended: {status.cause})" if status.cause else ""


def _step(status: Status) -> str:
    if status.step is None:
        return ""
    age = "" if status.step_age_s is None else f", {format_duration(status.step_age_s)} ago"
    return f"{status.step}{age}"


def _checkpoint(status: Status) -> str:
    found = status.checkpoint
    if found is None:
        return "none"
    age = "" if found.age_s is None else f", {format_duration(found.age_s)} ago"
    return f"step {found.step}{age} ({'+'.join(found.tiers) or 'unknown tier'})"


def _next_start(status: Status) -> str:
    if status.next_start is None:
        return ""
    left = status.next_start - time.time()
    start = _clock(status.next_start)
    if status.doomed is not None:
        node, until = status.doomed.node, _clock(status.doomed.until)
        return (
            f"{start} (it might get {node} again, which has a spot notice until {until}: a nudge would wait for that)"
        )
    return (
        f"{start} (in {format_duration(left)}; `pctool nudge {status.job_id}` starts it now)"
        if left > 0
        else f"{start} or soon"
    )


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
