"""The flags that describe a job, shared by render, submit and rehearse: sbatch's spelling, and they win over the file.

A verb that uses them says TAKES_COMMAND: `args.command` holds what stands behind `--`, `args.before` what stands before
it, and `args.unknown` what of that no flag of pctool's is.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pctool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pctool.spec.cluster import ClusterView
    from pctool.spec.job import JobSpec


def _every(text: str) -> int | str:
    from pctool.job.load import steps_or_time

    return steps_or_time(text)


_FLAGS: tuple[tuple[tuple[str, ...], str, str, Callable[[str], Any], str], ...] = (
    (("-J", "--job-name"), "name", "NAME", str, "name of the job (default: the script's name)"),
    (("-N", "--nodes"), "nodes", "N", int, "number of nodes"),
    (("-p", "--partition"), "partition", "QUEUE", str, "partition, i.e. ParallelCluster queue"),
    (("-t", "--time"), "time", "TIME", str, "time limit of one attempt, as in 2-00:00:00"),
    (("--gpus-per-node",), "gpus_per_node", "N", int, "GPUs of each node"),
    (("--ranks-per-node",), "ranks_per_node", "N", int, "ranks torchrun starts on a node (default: one a GPU)"),
    (("-c", "--cpus-per-task"), "cpus_per_task", "N", int, "CPUs of each node that the job gets"),
    (("--mem",), "mem", "SIZE", str, "memory of each node that the job gets; 0: all"),
    (("-C", "--constraint"), "constraint", "FEATURES", str, "features the nodes must have"),
    (("-A", "--account"), "account", "NAME", str, "account the job is charged to"),
    (("-q", "--qos"), "qos", "NAME", str, "quality of service"),
    (("-a", "--array"), "array", "TASKS", str, "tasks of a job array, each a run of its own, as in 0-7"),
    (("-d", "--dependency"), "dependency", "LIST", str, "jobs to wait for, as in afterok:1234"),
    (("-D", "--chdir"), "chdir", "DIR", str, "working directory of the job"),
    (("-o", "--output"), "output", "FILE", str, "the job's output (default: RUN/logs/slurm-%%j.out)"),
    (("--signal",), "signal", "B:SIG@S", str, "signal to the batch script S seconds before the time limit"),
    (("--run-dir",), "run_dir", "DIR", str, "run directory on the shared file system (default: runs/NAME)"),
    (("--store",), "checkpoint_store", "S3URL", str, "where checkpoints are mirrored, as in s3://bucket/prefix"),
    (("--every",), "checkpoint_every", "N|TIME|auto", _every, "steps or time (10min) between checkpoints, or auto"),
    (("--keep",), "checkpoint_keep", "N", int, "newest complete checkpoints kept (default: all)"),
    (("--keep-for",), "checkpoint_keep_for", "AGE", str, "how long each checkpoint is kept, as in 7d"),
    (("--keep-every",), "checkpoint_keep_every", "STEPS", int, "the first in each so many steps is kept for good"),
    (("--max-stalled",), "max_stalled", "N", int, "attempts without a new checkpoint before the job is held"),
    (("--stop-signal",), "stop_signal", "SIG", str, "for a script that cannot be changed: signal its ranks to stop"),
    (("--srun-wait",), "wait", "S", int, "srun --wait: seconds from the first task's end until the rest is killed"),
    (("--python",), "python", "PATH", str, "the interpreter that has torch (default: the one pctool runs under)"),
    (("--template",), "template", "FILE", str, "a batch script template of your own"),
)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the job file, the command, and the flags that describe a job."""
    parser.usage = f"{parser.prog} [FLAGS] JOB.toml | [FLAGS] -- SCRIPT [ARGUMENTS]"
    parser.add_argument("words", metavar="JOB.toml", nargs="*", help="the job file; - reads it from standard input")
    group = parser.add_argument_group("the job, in sbatch's words (a flag wins over the file)")
    for names, field, metavar, kind, text in _FLAGS:
        group.add_argument(*names, dest=f"job_{field}", metavar=metavar, type=kind, help=text)
    group.add_argument("--requeue", dest="job_requeue", action="store_true", default=None, help="requeue (the default)")
    group.add_argument("--no-requeue", dest="job_requeue", action="store_false", help="never requeue the job")
    group.add_argument("--exclusive", dest="job_exclusive", action="store_true", default=None, help="whole nodes")
    group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the ranks")
    group.add_argument("--het-group", help=argparse.SUPPRESS)


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --cluster."""
    parser.add_argument(
        "--cluster", metavar="CONFIG", help="check against this ParallelCluster config, not the cluster at hand"
    )


def spec_from_args(args: argparse.Namespace) -> JobSpec:
    """Return the resolved job spec of the job file and the flags. Raises UsageError for bad input."""
    from pctool.job.check import heterogeneous
    from pctool.job.load import job_from_flags, load_job

    if args.het_group is not None:
        raise heterogeneous("--het-group")
    job, command = split_words(args.words, args.command)
    _refuse_mixed(args, [] if args.command else command)
    values = flag_values(args)
    if command:
        values["command"] = tuple(command)
    return load_job(job, values) if job is not None else job_from_flags(values)


def split_words(words: list[str], behind: list[str]) -> tuple[str | None, list[str]]:
    """Return the job file, if one is given, and the command. A job file is `-` or ends in .toml."""
    job = words[0] if words and (words[0] == "-" or words[0].endswith(".toml")) else None
    rest = words[1:] if job is not None else words
    if rest and rest[0].endswith((".yaml", ".yml", ".json")):
        raise UsageError("this is neither a job file nor a script", where=rest[0], fix="write the job file as TOML")
    if rest and behind:
        raise UsageError(f"{rest[0]!r} stands before `--`", fix="put the whole command behind `--`")
    return job, rest or behind


def _refuse_mixed(args: argparse.Namespace, script: list[str]) -> None:
    """Refuse flags that may be meant for the script: it stands last, or behind `--`.

    sbatch gives what follows the script to the script. To take such a flag for pctool's own would run another job than
    the user wrote down.
    """
    before, unknown = args.before, args.unknown
    at = before.index(script[0]) if script else len(before)
    if unknown and before.index(unknown[0]) < at:
        raise UsageError(f"unknown flag {unknown[0]}", fix="see --help; the script and its own flags stand behind `--`")
    if script and (unknown or before[-len(script) :] != script):
        flag = next((word for word in before[at:] if word.startswith("-")), before[-1])
        raise UsageError(
            f"{flag} stands behind {script[0]}: is it for the script, or for pctool?",
            fix=f"put pctool's flags first and the command behind `--`, as in `-N 4 -- {script[0]} --lr 3e-4`",
        )


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the job spec that flags give."""
    fields = (name.removeprefix("job_") for name in vars(args) if name.startswith("job_"))
    values = {field: value for field in fields if (value := getattr(args, f"job_{field}")) is not None}
    if args.env:
        values["environment"] = dict(_pair(text) for text in args.env)
    return values


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env {text!r} has no '='", fix="write it as --env NAME=VALUE")
    return name, value


def cluster_from_args(args: argparse.Namespace) -> ClusterView | None:
    """Return the view of --cluster, or None."""
    if args.cluster is None:
        return None
    from pctool.cluster.view import load_view

    return load_view(args.cluster)


def print_notes(notes: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
