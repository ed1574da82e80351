"""What one launch is told, by its flags and by the environment. Read once, at the edge."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pctool.aws.imds import DEFAULT_ENDPOINT
from pctool.errors import UsageError
from pctool.node import wire
from pctool.node.actions import Timing
from pctool.node.notice_file import DEFAULT_PATH
from pctool.node.torchrun import MODULE
from pctool.run import env as names
from pctool.run.layout import AttemptDir, RunDir

_FROM_SRUN = "start it with srun, one task a node, inside a job that has claimed an attempt: see `pctool render`"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Everything a launch knows of its place in the gang."""

    run: RunDir
    attempt: int
    nonce: str
    hub_host: str
    hub_port: int
    node: int  # 0: this launch is the hub
    nodes: int
    name: str  # as Slurm calls the node
    per_node: int
    python: str
    script: tuple[str, ...]
    stop_signal: signal.Signals | None
    poll_s: float
    imds: str
    notice_file: Path
    store: str | None
    environ: Mapping[str, str]  # handed on to the ranks
    module: str = MODULE  # run as torchrun
    mirror_module: str = "pctool.checkpoint.mirror"
    timing: Timing = field(default_factory=Timing)

    @property
    def job(self) -> str:
        """Return this job's id as Slurm's commands take it: a task's own, since one task has the id of its array."""
        array, task = self.environ.get("SLURM_ARRAY_JOB_ID"), self.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else self.environ.get("SLURM_JOB_ID", "")

    @property
    def attempt_dir(self) -> AttemptDir:
        """Return this attempt's folder."""
        return self.run.attempt(self.attempt)


def read_config(
    environ: Mapping[str, str],
    *,
    per_node: int,
    python: str,
    script: Sequence[str],
    stop_signal: str | None,
    poll_s: float,
) -> LaunchConfig:
    """Put flags and environment together. Raise UsageError for what is missing or not to be had."""
    if environ.get("SLURM_HET_SIZE"):
        raise UsageError(
            "this is a heterogeneous job, whose nodes are no one gang",
            where=f"job {environ.get('SLURM_JOB_ID', '?')}",
            fix="submit a job without `:` between its parts, on one kind of node",
        )
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise UsageError("two launches on one node", fix="give srun --ntasks-per-node=1; torchrun starts the ranks")
    try:
        host, port = wire.split_address(_need(environ, names.HUB))
    except ValueError as error:
        raise UsageError(str(error), where=names.HUB, fix=_FROM_SRUN) from None
    return LaunchConfig(
        run=RunDir(Path(_need(environ, names.RUN_DIR))),
        attempt=_number(environ, names.ATTEMPT),
        nonce=_need(environ, names.NONCE),
        hub_host=host,
        hub_port=port,
        node=_number(environ, "SLURM_NODEID"),
        nodes=_number(environ, "SLURM_STEP_NUM_NODES"),
        name=_need(environ, "SLURMD_NODENAME"),
        per_node=per_node,
        python=python,
        script=tuple(script),
        stop_signal=parse_signal(stop_signal) if stop_signal else None,
        poll_s=poll_s,
        imds=environ.get(names.IMDS, DEFAULT_ENDPOINT),
        notice_file=Path(environ.get(names.NOTICE_FILE) or DEFAULT_PATH),
        store=environ.get(names.STORE) or None,
        environ=dict(environ),
    )


def parse_signal(text: str) -> signal.Signals:
    """Read a signal as Slurm writes it: USR1, SIGUSR1 or 10. Raise UsageError."""
    try:
        if text.isdigit():
            found = signal.Signals(int(text))
        else:
            found = signal.Signals["SIG" + text.upper().removeprefix("SIG")]
    except (KeyError, ValueError):
        raise UsageError(f"no signal {text!r}", where="--stop-signal", fix="write a name such as USR1") from None
    if found in {signal.SIGKILL, signal.SIGSTOP}:
        raise UsageError(f"no script can catch {found.name}", where="--stop-signal", fix="write a name such as USR1")
    return found


def _need(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"{name} is not set", where="environment", fix=_FROM_SRUN)
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _need(environ, name)
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} is not a number", where="environment", fix=_FROM_SRUN)
    return int(text)
