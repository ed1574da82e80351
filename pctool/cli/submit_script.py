"""`pctool submit [SBATCH OPTIONS] script.sh [ARGUMENTS]`: a batch script as it stands, with a ledger."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pctool.cli.jobflags import print_notes
from pctool.errors import UsageError
from pctool.facts.sbatch_options import NEWEST, NONE, REQUIRED, Option

if TYPE_CHECKING:
    from pctool.script.getopt import Command
    from pctool.script.reading import Problem
    from pctool.spec.plan import BatchPlan

_OURS = (
    Option("run-dir", "", REQUIRED),
    Option("force", "", NONE),
    Option("dry-run", "", NONE),
    Option("json", "", NONE),
    Option("parsable", "", NONE),
)
_MAX_BYTES = 4 << 20  # slurmctld's own limit on a script
_BEGINNING = 65536
_SHELLS = ("sh", "bash", "ksh", "dash", "zsh", "csh", "tcsh")
# Variables by which the environment overrides what is read here of a script (man sbatch, INPUT ENVIRONMENT VARIABLES).
_VARIABLES = {
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_COMMENT": "comment",
    "SBATCH_WAIT": "wait",
}


def has_batch_script(argv: Sequence[str]) -> bool:
    """Return whether the words of a `pctool submit` name a batch script, and neither a job file nor a template.

    A batch script is a file that begins with `#!` and a shell, or has an `#SBATCH` line. A Python program without one
    is a training script, as is whatever stands behind `--`.
    """
    words = argv[: list(argv).index("--")] if "--" in argv else argv
    if any(word.endswith(".toml") or word.partition("=")[0] == "--template" for word in words):
        return False
    return any(not word.startswith("-") and _is_batch_script(word) for word in words)


def _is_batch_script(path: str) -> bool:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
    except OSError:
        return False  # no file at all: the word is something else, and whoever needs it will say what is wrong
    with open(path, "rb") as file:
        head = file.read(_BEGINNING)
    has_directive = b"\n#SBATCH" in b"\n" + head
    first = head.partition(b"\n")[0]
    names = [os.path.basename(word).decode("utf-8", "replace") for word in first[2:].split()[:2]]
    shell = next((name for name in names if name != "env"), "")
    return has_directive or (first.startswith(b"#!") and shell in _SHELLS)


def run_script(argv: Sequence[str]) -> int:
    """Check the script's directives, then submit it, or print what would be done."""
    from pctool.script.getopt import split_command

    command = split_command(argv, version=NEWEST, extra=_OURS)
    if command is None or not _is_batch_script(command.script):
        raise UsageError("no batch script", fix="name it behind sbatch's options, as in `pctool submit -N 2 job.sh`")
    plan = _plan(command)
    if "dry-run" in command.extra:
        print_notes(plan.warnings)
        print(_plan_text(plan, as_json="json" in command.extra))
        return 0
    from pctool.job.batch import execute_batch

    job = execute_batch(plan)
    print_notes(job.notes)
    if "json" in command.extra:
        print(json.dumps({"job_id": job.job_id, "run_dir": job.run_dir, "output": job.output}))
    elif "parsable" in command.extra:
        print(job.job_id)
    else:
        print(f"Submitted batch job {job.job_id}")
        print(f"run directory: {job.run_dir}\nfollow it with `pctool logs -f {job.job_id}`", file=sys.stderr)
    return 0


def _plan(command: Command) -> BatchPlan:
    from pctool.job.batch import plan_batch
    from pctool.script.read import read_directives

    text = _read(command.script)
    directives = read_directives(text, version=_version())
    fault = _fault(command.script, text, directives.problems)
    if fault and "force" not in command.extra:
        raise UsageError(fault, fix="mend the script, or let sbatch judge it all the same with --force")
    effective = {one.name: one.value or "" for one in directives.given if one.component == 0}
    effective |= {option: os.environ[name] for name, option in _VARIABLES.items() if name in os.environ}
    effective |= {one.name: one.value or "" for one in command.given}
    return plan_batch(
        command.script,
        text,
        options=command.options,
        arguments=command.arguments,
        effective=effective,
        run_dir=command.extra.get("run-dir"),
        warnings=(fault,) if fault else (),
    )


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise UsageError("larger than 4 MiB, which Slurm refuses", where=path, fix="is this the batch script?")
    return text


def _version() -> tuple[int, int]:
    """Return the version of Slurm here; sbatch will say what is wrong where there is none."""
    from pctool.errors import SlurmError
    from pctool.slurm import query

    try:
        return query.slurm_version()
    except SlurmError:
        return NEWEST


def _fault(script: str, text: bytes, problems: Sequence[Problem]) -> str | None:
    """Return where and why sbatch would refuse. It gives up at the first fault, which may take it several lines."""
    from pctool.script.source import Source

    if not problems:
        return None
    line, column = Source(script, text).place(problems[0].start)
    words = (problem.message.removeprefix("error: ").removeprefix("fatal: ") for problem in problems)
    return f"{script}:{line}:{column}: {' '.join(words)}"


def _plan_text(plan: BatchPlan, *, as_json: bool) -> str:
    import shlex

    runs = plan.run_dirs or (f"{plan.folder}/{plan.name}-JOBID",)
    if as_json:
        return json.dumps({"argv": list(plan.argv), "run_dirs": list(runs), "warnings": list(plan.warnings)}, indent=2)
    return "\n".join([f"# the ledger goes into {', '.join(runs)}", shlex.join(plan.argv)])
