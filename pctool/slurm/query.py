"""Ask Slurm, and get values. Every call has a time-out; a job or node that is not there is None, not an error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pctool.errors import SlurmError
from pctool.slurm.command import TIMEOUT_S, Completed, RefusedError, failed, run
from pctool.slurm.parse import (
    QUEUE_FORMAT,
    JobInfo,
    NodeInfo,
    PartitionInfo,
    QueueLine,
    parse_config,
    parse_exit_codes,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_version,
)

OLDEST_VERSION = (22, 5)
PATIENCE_S = 120.0  # slurmctld's own SlurmctldTimeout: it is restarted, or its backup takes over, in that time
# Where the job would be over without Slurm's answer. ParallelCluster has no backup controller, so a reboot of the head
# node has to be outlasted. The wait costs nothing: a job's nodes stay its own until slurmctld hears of its end.
LONG_PATIENCE_S = 1800.0
RETRY_S = 3.0
_GONE = ("Invalid job id", "not found")
_T = TypeVar("_T")


def ask(argv: Sequence[str], *, timeout: float = TIMEOUT_S, check: bool = True) -> Completed:
    """Run one of Slurm's commands without the settings by which a user's environment changes its output."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SINFO_", "SCONTROL_"))}
    return run(argv, timeout=timeout, check=check, env={**env, "SLURM_TIME_FORMAT": "standard"})


def patiently(call: Callable[[], _T], *, patience: float = PATIENCE_S, period: float = RETRY_S) -> _T:
    """Return what `call` returns; a SlurmError is met with another try every `period` seconds, for `patience` seconds.

    For decisions that must not be lost because slurmctld is being restarted. Raises the last SlurmError, and a
    RefusedError at once.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except RefusedError:
            raise
        except SlurmError:
            if time.monotonic() + period > deadline:
                raise
            time.sleep(period)


def show_jobs(job_id: str, *, timeout: float = TIMEOUT_S) -> list[JobInfo]:
    """Return the records of one id (every task for an array's id); [] when Slurm does not know it (any more)."""
    done = ask(["scontrol", "show", "job", job_id], timeout=timeout, check=False)
    if done.code != 0:
        _raise_unless_gone(done)
        return []
    return parse_jobs(done.stdout)


def show_job(job_id: str, *, timeout: float = TIMEOUT_S) -> JobInfo | None:
    """Return one job (123 or 123_4), or None when Slurm does not know it (any more).

    Raises SlurmError when Slurm does not answer: that is never "not there".
    """
    jobs = show_jobs(job_id, timeout=timeout)
    exact = [job for job in jobs if job_id in (job.job_id, job.label)]
    return next(iter(exact or jobs), None)


def job_states(ids: Sequence[str], *, timeout: float = TIMEOUT_S) -> dict[str, str]:
    """Return id -> state for those of `ids` that squeue has (waiting, running, completing); the others are gone.

    Keys are the ids as given: 123 or 123_4.
    """
    if not ids:
        return {}
    argv = ["squeue", "-h", "-r", "-t", "all", "-j", ",".join(ids), "-o", QUEUE_FORMAT]
    done = ask(argv, timeout=timeout, check=False)
    if done.code != 0:
        _raise_unless_gone(done)
        return {}
    states: dict[str, str] = {}
    for line in parse_queue(done.stdout):
        states.update({key: line.state for key in (line.label, line.job_id) if key in ids})
    return states


def my_jobs(*, timeout: float = TIMEOUT_S) -> list[QueueLine]:
    """Return the caller's jobs that wait, run or complete, a line an array task."""
    return parse_queue(ask(["squeue", "-h", "-r", "--me", "-o", QUEUE_FORMAT], timeout=timeout).stdout)


def partitions(*, timeout: float = TIMEOUT_S) -> list[PartitionInfo]:
    """Return the cluster's partitions, hidden ones too."""
    return parse_partitions(ask(["scontrol", "-a", "show", "partition"], timeout=timeout).stdout)


def show_node(name: str, *, timeout: float = TIMEOUT_S) -> NodeInfo | None:
    """Return one node, or None if there is none of that name."""
    done = ask(["scontrol", "-a", "show", "node", name], timeout=timeout, check=False)
    if done.code != 0:
        _raise_unless_gone(done)
        return None
    return next((node for node in parse_nodes(done.stdout) if node.name == name), None)


def show_nodes(nodelist: str = "", *, timeout: float = TIMEOUT_S) -> list[NodeInfo]:
    """Return the nodes of a (folded) list, or all."""
    argv = ["scontrol", "-a", "show", "node", *([nodelist] if nodelist else [])]
    return parse_nodes(ask(argv, timeout=timeout).stdout)


def node_addr(name: str, *, timeout: float = TIMEOUT_S) -> str | None:
    """Return the address Slurm itself uses for a node (NodeAddr), or None if there is no such node."""
    node = show_node(name, timeout=timeout)
    return node.addr if node else None


def config(*, timeout: float = TIMEOUT_S) -> dict[str, str]:
    """Return slurmctld's settings as `scontrol show config` has them."""
    return parse_config(ask(["scontrol", "show", "config"], timeout=timeout).stdout)


def requeue_exit_codes(settings: dict[str, str] | None = None) -> tuple[frozenset[int], frozenset[int]]:
    """Return the codes of RequeueExit and of RequeueExitHold; asks for the settings unless they are given."""
    settings = config() if settings is None else settings
    return parse_exit_codes(settings.get("RequeueExit", "")), parse_exit_codes(settings.get("RequeueExitHold", ""))


def slurm_version(*, timeout: float = TIMEOUT_S) -> tuple[int, int]:
    """Return the version of Slurm's commands here, (22, 5) for 22.05.8. Raise SlurmError if it is older than that."""
    version = parse_version(ask(["scontrol", "--version"], timeout=timeout).stdout)
    if version < OLDEST_VERSION:
        raise SlurmError(
            f"Slurm {version[0]}.{version[1]:02d} is too old", fix="use a cluster with Slurm 22.05 or newer"
        )
    return version


def hostnames(nodelist: str, *, timeout: float = TIMEOUT_S) -> tuple[str, ...]:
    """Return the names in a folded node list, in its order. Works without slurmctld."""
    if not nodelist:
        return ()
    return tuple(ask(["scontrol", "show", "hostnames", nodelist], timeout=timeout).stdout.split())


def _raise_unless_gone(done: Completed) -> None:
    """Raise SlurmError unless Slurm said that what was asked for is not there."""
    said = f"{done.stderr}\n{done.stdout}"
    if any(phrase in said for phrase in _GONE):
        return
    raise failed(done)
