"""Make the plan of a submission: a pure function from a job spec, and what is known of the cluster, to a value."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pctool.errors import UsageError
from pctool.job.array import NO_TASK, parse_array, task_run_dir
from pctool.job.check import check_cluster, check_spec, fitting_resources
from pctool.job.dump import dump_job, job_document
from pctool.job.render import output_pattern, render_script
from pctool.run.layout import RunDir
from pctool.spec.cluster import ClusterView, QueueView
from pctool.spec.job import JobSpec
from pctool.spec.plan import Plan
from pctool.units import format_time, parse_signal, parse_time

OLDEST, NEWEST = (22, 5), (26, 5)  # the versions of Slurm the script is written and tested for
SBATCH = ("sbatch", "--parsable", "--ignore-pbs")  # a line #PBS anywhere in the script would win over #SBATCH
_WIDEST = 10  # how far a number in the name of an output file is padded at most, seen on 22.05.8
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def make_plan(
    spec: JobSpec,
    *,
    slurm_version: tuple[int, int] | None = None,
    view: ClusterView | None = None,
    interpreter: str = sys.executable,
    user: str = "",
) -> Plan:
    """Return everything a submission of `spec` will do. Starts nothing and looks at no cluster.

    With a `view` the job is checked against its partition, and CPUs are asked for where the spec leaves them out.
    `user` stands for %u in the output path. Raises UsageError for what sbatch or the cluster would refuse.
    """
    check_spec(spec)
    version = slurm_version or (view.slurm_version if view else None)
    _check_version(version)
    queue = check_cluster(spec, view) if view else None
    warnings = [*_warnings(spec, queue), *_version_warnings(version)]
    if not (view and view.one_machine):
        warnings += _shared_warnings(spec)
    if queue:
        spec, notes = _with_cpus(spec, queue)
        warnings += notes
    return Plan(
        spec=spec,
        script=render_script(spec, interpreter=interpreter),
        argv=SBATCH,
        directories=tuple(_directories(spec, user)),
        files={str(RunDir(run).job_toml): dump_job(spec) for run in run_dirs(spec)},
        warnings=tuple(warnings),
    )


def run_dirs(spec: JobSpec) -> list[Path]:
    """Return the run directories of a job: one, or for an array the common folder and one a task."""
    common = Path(spec.run_dir)
    tasks = parse_array(spec.array) if spec.array else ()
    return [common, *(task_run_dir(common, task) for task in tasks)]


def submitit_folder(spec: JobSpec) -> Path:
    """Return the folder where submitit keeps the script and its pickle."""
    return Path(spec.run_dir) / "logs" / "submitit"


def output_path(spec: JobSpec, job_id: str, user: str) -> Path:
    """Return the file that holds the output of a submitted job (123, or 123_4 for a task of an array)."""
    array, _, task = job_id.partition("_")
    numbers = {"j": job_id, "J": job_id, "A": array, "a": task or NO_TASK}
    texts = {"x": spec.name, "u": user}

    def expand(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter in numbers:
            return numbers[letter].zfill(min(int(width or 0), _WIDEST))
        return texts.get(letter, f"{width}%")

    return Path(re.sub(r"%(\d*)([jJAaxu%])", expand, output_pattern(spec)))


def _directories(spec: JobSpec, user: str) -> Iterator[str]:
    for run in run_dirs(spec):
        yield str(run)
    yield str(submitit_folder(spec).parent)
    yield str(submitit_folder(spec))
    folder = os.path.dirname(output_pattern(spec))
    known = {"x": spec.name, "u": user}
    made = re.sub(r"%(\d*)([xu%])", lambda match: known.get(match[2], f"{match[1]}%") or match[0], folder)
    if re.search(r"%\w", made):
        raise UsageError(
            f"output: the folder {folder!r} is known only once the job runs, and Slurm does not make it",
            fix="use %j, %A, %a and the like in the file's name only",
        )
    if made != str(submitit_folder(spec).parent):
        yield made


def _check_version(version: tuple[int, int] | None) -> None:
    if version and version < OLDEST:
        raise UsageError(
            f"Slurm {_dotted(version)} is too old for the batch script", fix=f"use Slurm {_dotted(OLDEST)} or newer"
        )


def _version_warnings(version: tuple[int, int] | None) -> Iterator[str]:
    if version and version > NEWEST:
        yield f"Slurm {_dotted(version)} is newer than {_dotted(NEWEST)}, the newest the batch script was tried with"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02d}"


def _warnings(spec: JobSpec, queue: QueueView | None) -> Iterator[str]:
    yield from _signal_warnings(spec)
    gpus = max((cr.gpus for cr in queue.compute_resources), default=0) if queue else 0
    if queue and gpus and not (spec.gpus_per_node or spec.exclusive or queue.exclusive):  # these give all of them
        yield (
            f"the job asks for no GPUs, and nodes of partition {queue.name} have {gpus}: its ranks will see none; "
            f"use gpus-per-node = {gpus}"
        )
    if queue and queue.capacity_type == "SPOT" and not spec.requeue:
        yield f"partition {queue.name} is spot capacity and requeue is off: the job ends for good when a node is taken"
    if not spec.cpus_per_task and not spec.exclusive and not queue:
        yield "neither cpus-per-task nor exclusive is set: Slurm gives the job one CPU a node"
    if not spec.checkpoint_store and (spec.checkpoint_mirror or spec.checkpoint_mirror_mbps):
        yield "checkpoint.mirror and checkpoint.mirror-mbps mean nothing without checkpoint.store: nothing is mirrored"
    if spec.checkpoint_keep == 1:
        yield "checkpoint.keep = 1: two complete checkpoints are kept all the same, one could turn out damaged"
    if spec.checkpoint_keep_every and not (spec.checkpoint_keep or spec.checkpoint_keep_for):
        yield "checkpoint.keep-every alone removes nothing: set keep or keep-for, which say that the rest may go"


def _shared_warnings(spec: JobSpec) -> Iterator[str]:
    shared = not any(spec.run_dir == top or spec.run_dir.startswith(f"{top}/") for top in _NODE_LOCAL)
    if not shared and (spec.requeue or spec.nodes > 1):
        yield (
            f"run-dir {spec.run_dir} is on a file system that each node has for itself: after a requeue the "
            "checkpoints may be gone; use a shared one, such as /fsx"
        )


def _signal_warnings(spec: JobSpec) -> Iterator[str]:
    signal = parse_signal(spec.signal)
    if not signal.batch_only:
        yield (
            f"signal {spec.signal!r} has no B:, so Slurm sends SIG{signal.name} to every training process, whose "
            f"data-loader workers die of it, and not to the batch script; use B:{signal.name}@{signal.seconds}"
        )
    limit = parse_time(spec.time) if spec.time else None
    if limit and signal.seconds >= limit:
        yield (
            f"signal {spec.signal!r} comes {signal.seconds} s before the end, but the time limit is "
            f"{format_time(limit)}: the job is asked to stop as soon as it starts"
        )


def _with_cpus(spec: JobSpec, queue: QueueView) -> tuple[JobSpec, list[str]]:
    """Ask for the CPUs that go with the GPUs asked for, since Slurm's own default is one CPU a task."""
    if spec.cpus_per_task or spec.exclusive or queue.exclusive:
        return spec, []
    if not spec.gpus_per_node:
        return spec, ["neither cpus-per-task nor exclusive is set: Slurm gives the job one CPU a node"]
    cpus = min(cr.cpus * spec.gpus_per_node // cr.gpus for cr in fitting_resources(spec, queue))
    if cpus < 1:
        return spec, []
    note = f"cpus-per-task is not set: {cpus} are asked for, the share of a node that goes with its GPUs"
    return replace(spec, cpus_per_task=cpus), [note]


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, for `--dry-run --json`."""
    return {
        "job": job_document(plan.spec),
        "argv": list(plan.argv),
        "directories": list(plan.directories),
        "files": dict(plan.files),
        "script": plan.script,
        "warnings": list(plan.warnings),
    }


def plan_text(plan: Plan, *, as_json: bool = False) -> str:
    """Return a plan as people read it, or as JSON."""
    if as_json:
        return json.dumps(plan_document(plan), indent=2)
    lines = ["# directories, made first", *plan.directories]
    for path, text in _distinct_files(plan):
        lines += ["", f"# {path}", text.rstrip("\n")]
    command = " ".join(plan.argv)
    return "\n".join([*lines, "", f"# then `{command}` with this script", plan.script.rstrip("\n")])


def _distinct_files(plan: Plan) -> Iterator[tuple[str, str]]:
    """Give each text once: the tasks of an array have the same."""
    paths: dict[str, list[str]] = {}
    for path, text in plan.files.items():
        paths.setdefault(text, []).append(path)
    for text, names in paths.items():
        yield (names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} copies, one a task)"), text
