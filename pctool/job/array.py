"""Job arrays: which tasks a value of --array names, the run directory of each, and its name for Slurm's commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pctool.errors import UsageError

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
NO_TASK = "4294967294"  # what Slurm writes for %a in an output's name where there is no task; seen on 22.05.8
MAX_TASKS = 100_000  # run directories are made for all of them; Slurm's own default limit is 1001


def parse_array(text: str) -> tuple[int, ...]:
    """Return the task ids that sbatch's --array names, ascending: '0-6:2,9%2' -> (0, 2, 4, 6, 9).

    Raises UsageError for what sbatch would refuse. Source: man sbatch, --array.
    """
    listed, percent, limit = text.strip().partition("%")
    tasks: set[int] = set()
    for part in listed.split(","):
        match = _PART.fullmatch(part)
        if not match or (percent and not limit.isdigit()):
            raise _not_an_array(text)
        low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if high < low or step < 1:
            raise _not_an_array(text)
        if (high - low) // step + len(tasks) >= MAX_TASKS:
            raise UsageError(f"array {text!r} has more than {MAX_TASKS} tasks", fix="submit it in several arrays")
        tasks.update(range(low, high + 1, step))
    return tuple(sorted(tasks))


def task_run_dir(run_dir: str | Path, task: int | str) -> Path:
    """Return the run directory of one task of an array."""
    return Path(run_dir) / f"task-{task}"


def task_label(environ: Mapping[str, str]) -> str:
    """Return the id by which Slurm's commands take this array task and no other, 9_1; '' outside an array.

    SLURM_JOB_ID will not do: that of the task that starts last is the id of the whole array, and `scontrol requeue`,
    `requeuehold` and `update` then act on every task (seen on 22.05.8).
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else ""


def _not_an_array(text: str) -> UsageError:
    return UsageError(f"array {text!r} is not what --array takes", fix="write it as 0-7, 1,3,5, 0-15:4 or 0-99%10")
