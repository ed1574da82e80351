"""Check a job spec: its values, its script, and whether a cluster can run it. Errors say what to write instead."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pctool.checkpoint.interval import parse_every
from pctool.checkpoint.retention import parse_keep_for
from pctool.errors import PctoolError, UsageError
from pctool.job.array import parse_array
from pctool.job.keys import key_of
from pctool.spec.cluster import ClusterView, ComputeResourceView, QueueView
from pctool.spec.job import MIRROR_WAYS, JobSpec
from pctool.units import parse_memory_mib, parse_signal, parse_time

_AT_LEAST: Mapping[str, int] = {
    "nodes": 1,
    "gpus_per_node": 0,
    "ranks_per_node": 1,
    "cpus_per_task": 1,
    "wait": 1,  # srun takes 0 for "without an end"
    "max_stalled": 1,
    "checkpoint_keep": 1,
    "checkpoint_keep_every": 1,
    "checkpoint_mirror_mbps": 1,
}
_LAUNCHERS = {"torchrun": "pctool starts torchrun itself", "srun": "the batch script calls srun itself"}
_NOT_CATCHABLE = ("KILL", "STOP")


def check_spec(spec: JobSpec, *, where: str | None = None) -> JobSpec:
    """Return the spec if every value is one that sbatch and pctool take; raise UsageError for the first that is not."""
    for field, least in _AT_LEAST.items():
        value = getattr(spec, field)
        if value is not None and value < least:
            raise UsageError(f"{key_of(field)} is {value}", where=where, fix=f"use at least {least}")
    for entry in fields(spec):
        _check_text(entry.name, getattr(spec, entry.name), where)
    _check_run_dir(spec.run_dir, where)
    _check_command(spec.command, where)
    _check_environment(spec.environment, where)
    for check, value in _notations(spec):
        _placed(check, value, where)
    return spec


def _notations(spec: JobSpec) -> Iterable[tuple[Callable[[Any], object], object]]:
    yield parse_time, spec.time
    yield parse_memory_mib, spec.mem
    yield _catchable_signal, spec.signal
    yield _signal_name, spec.stop_signal
    yield parse_array, spec.array
    yield _store, spec.checkpoint_store
    yield parse_every, spec.checkpoint_every
    yield parse_keep_for, spec.checkpoint_keep_for
    yield _mirror, spec.checkpoint_mirror


def _placed(check: Callable[[Any], object], value: object, where: str | None) -> None:
    if value is None:
        return
    try:
        check(value)
    except PctoolError as error:
        raise UsageError(error.what, where=where, fix=error.fix) from None


def _check_text(field: str, value: object, where: str | None) -> None:
    """Texts become words of #SBATCH lines, which can hold no line break."""
    if not isinstance(value, str):
        return
    if not value.strip():
        raise UsageError(f"{key_of(field)} is empty", where=where, fix="give it a value or leave the key out")
    if not value.isprintable():
        raise UsageError(f"{key_of(field)} holds a line break or control character: {value!r}", where=where)


def _check_run_dir(run_dir: str, where: str | None) -> None:
    if not run_dir.startswith("/"):
        raise UsageError(f"run-dir {run_dir!r} is not absolute", where=where, fix="write the whole path")
    if Path(run_dir) == Path("/"):
        raise UsageError("run-dir is the root folder", where=where, fix="give the run a folder of its own")
    for character in "%\\":
        if character in run_dir:
            raise UsageError(
                f"run-dir {run_dir!r} holds {character!r}, which Slurm reads as a pattern in file names",
                where=where,
                fix=f"use a path without {character!r}; tasks of an array get a folder each below it",
            )


def _check_command(command: tuple[str, ...], where: str | None) -> None:
    if not command:
        raise UsageError("the job has no command", where=where, fix='write command = ["train.py", ...]')
    for word in command:
        if not _scriptable(word):
            raise UsageError(f"command holds a character that no batch script can: {word!r}", where=where)
    first = Path(command[0]).name
    if first in _LAUNCHERS or re.fullmatch(r"python[\d.]*", first):
        reason = _LAUNCHERS.get(first, "torchrun starts Python itself; `python` in the job spec names the interpreter")
        raise UsageError(f"the command begins with {first!r}", where=where, fix=f"begin with the script: {reason}")
    if command[0].startswith("-") and (command[0] != "-m" or len(command) < 2):
        raise UsageError(
            f"the command begins with the option {command[0]!r}",
            where=where,
            fix="begin with the script, as in `train.py --lr 3e-4`, or with `-m MODULE`",
        )


def _check_environment(environment: Mapping[str, str], where: str | None) -> None:
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"environment: {name!r} is not a variable's name", where=where)
        if name.startswith("PCTOOL_"):
            raise UsageError(f"environment: {name} is set by pctool", where=where, fix="leave it out")
        if not _scriptable(value):
            raise UsageError(f"environment: {name} holds a character that no batch script can", where=where)


def _scriptable(text: str) -> bool:
    """Return whether a batch script can hold the text: sbatch refuses NUL and DOS line ends, a file needs UTF-8."""
    return "\0" not in text and "\r\n" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def _signal_name(name: str) -> None:
    if not hasattr(signal, f"SIG{name.upper().removeprefix('SIG')}"):
        raise UsageError(f"stop-signal {name!r} is not a signal", fix="write a name such as USR1 or TERM")
    if name.upper().removeprefix("SIG") in _NOT_CATCHABLE:
        raise UsageError(f"stop-signal {name!r}: no script can catch it", fix="write a name such as USR1 or TERM")


def _catchable_signal(text: str) -> None:
    option = parse_signal(text)
    if option.name in _NOT_CATCHABLE:
        raise UsageError(f"signal {text!r}: no script can catch {option.name}", fix="use B:USR1@300")


def _store(store: str) -> None:
    if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?", store):
        raise UsageError(f"checkpoint.store {store!r} is not a place in S3", fix="write it as s3://bucket/prefix")


def _mirror(way: str) -> None:
    if way not in MIRROR_WAYS:
        raise UsageError(f"checkpoint.mirror {way!r} is no way to the store", fix='write "copy" or "dra"')


def check_script(spec: JobSpec, *, where: str | None = None) -> JobSpec:
    """Return the spec if its script is there; raise UsageError if not. `-m MODULE` is found on the nodes."""
    script = Path(spec.command[0])
    if spec.command[0] != "-m" and not script.is_file():
        what = "is not a file" if script.exists() else "is not there"
        raise UsageError(
            f"the script {script} {what}",
            where=where,
            fix="correct the path; in a job file it is relative to the file's folder",
        )
    return spec


def heterogeneous(where: str | None) -> UsageError:
    """Return the error for heterogeneous jobs, which pctool does not run."""
    return UsageError(
        "heterogeneous jobs are not supported: all nodes of a gang are of one kind",
        where=where,
        fix="ask for one kind of node, or make two jobs and join them with dependency",
    )


def check_cluster(spec: JobSpec, view: ClusterView) -> QueueView:
    """Return the queue the job goes to; raise UsageError if the cluster has no such partition or too little in it."""
    queue = view.queue(spec.partition) if spec.partition else view.default_queue
    if queue is None:
        names = [queue.name for queue in view.queues]
        near = difflib.get_close_matches(spec.partition or "", names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(names)}"
        raise UsageError(f"the cluster has no partition {spec.partition!r}", where=view.source, fix=hint)
    limit = _node_limit(queue)
    if spec.nodes > limit:
        raise UsageError(
            f"the job asks for {spec.nodes} nodes, but partition {queue.name!r} has {limit}",
            where=view.source,
            fix=f"use nodes = {limit} or fewer, or raise MaxCount in the cluster config",
        )
    _check_resources(spec, queue, view.source)
    return queue


def _node_limit(queue: QueueView) -> int:
    limit = queue.custom_settings.get("MaxNodes", "")
    return min(queue.max_nodes, int(limit)) if limit.isdigit() else queue.max_nodes


def _check_resources(spec: JobSpec, queue: QueueView, source: str) -> None:
    memory = parse_memory_mib(spec.mem) if spec.mem else 0
    wants: list[tuple[str, int, Callable[[ComputeResourceView], int]]] = [
        ("gpus-per-node", spec.gpus_per_node, lambda cr: cr.gpus),
        ("cpus-per-task", spec.cpus_per_task or 1, lambda cr: cr.cpus),
        ("mem (MiB)", memory, lambda cr: cr.real_memory_mib),
    ]
    fitting = [cr for cr in queue.compute_resources if all(want <= have(cr) for _, want, have in wants)]
    if sum(cr.max_count for cr in fitting) >= spec.nodes:
        return
    for name, want, have in wants:
        most = max((have(cr) for cr in queue.compute_resources), default=0)
        if want > most:
            raise UsageError(
                f"the job asks for {name} = {want}, but a node of partition {queue.name!r} has at most {most}",
                where=source,
                fix=f"ask for at most {most}" + ("; mem = 0 asks for all of a node" if memory else ""),
            )
    count = sum(cr.max_count for cr in fitting)
    raise UsageError(
        f"only {count} nodes of partition {queue.name!r} have what each of the {spec.nodes} nodes is asked to have",
        where=source,
        fix="ask for fewer nodes, or for less of each",
    )


def fitting_resources(spec: JobSpec, queue: QueueView) -> list[ComputeResourceView]:
    """Return the compute resources whose nodes have the GPUs the job asks for."""
    return [cr for cr in queue.compute_resources if cr.gpus >= spec.gpus_per_node]
