"""The one place that starts Slurm's commands: an argv, a time-out, a clear error."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pctool.errors import SlurmError


class NoAnswerError(SlurmError):
    """A command gave no answer in time: what it was to do may have been done, or not."""


class RefusedError(SlurmError):
    """Slurm has understood what was asked and will not do it: asking again changes nothing."""


_PING = "check that slurmctld is up with `scontrol ping`, then try again"
_NO_CLUSTER = re.compile(r"configuration source|Unable to open.*slurm\.conf|stat.*slurm\.conf", re.IGNORECASE)
_NO_CLUSTER_FIX = (
    "there is no Slurm cluster here: go to the head node or a login node, or `export SLURM_CONF=...` "
    "(`pctool local status` shows that of a private one)"
)
_START_FIX = "see whether the folder of Slurm's commands is mounted here, and whether this node can start processes"
_SILENT = re.compile(r"timed out|Unable to contact|Connection refused|communicat", re.IGNORECASE)
TIMEOUT_S = 30.0  # Slurm's own MessageTimeout is 10 s by default, 60 s on ParallelCluster


@dataclass(frozen=True)
class Completed:
    """What a command printed and how it ended."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
) -> Completed:
    """Run one command and return what it printed.

    Raises SlurmError if the command is not installed or cannot be started, NoAnswerError (one too) if it does not
    answer in `timeout` seconds, and with `check` SlurmError for another code than 0; the message holds what Slurm said.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=None if env is None else dict(env),
            check=False,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"the command {argv[0]!r} is not there",
            fix="run this on a node with Slurm's commands on PATH (on ParallelCluster: the head node or a login node)",
        ) from None
    except OSError as error:  # the file system that has the command is away, or this node is out of processes
        raise SlurmError(f"the command {argv[0]!r} cannot be started: {error.strerror}", fix=_START_FIX) from error
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"`{' '.join(argv)}` gave no answer in {timeout:g} s",
            fix=_PING,
        ) from None
    completed = Completed(tuple(argv), done.returncode, done.stdout, done.stderr)
    if check and completed.code != 0:
        raise failed(completed)
    return completed


def failed(done: Completed) -> SlurmError:
    """Return the error for a command that ended with another code than 0, with what Slurm said."""
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    fix = _NO_CLUSTER_FIX if _NO_CLUSTER.search(done.stderr) else _PING if _SILENT.search(said) else None
    return SlurmError(f"`{' '.join(done.argv)}` exited with {done.code} and said: {said}", fix=fix)
