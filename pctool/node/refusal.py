"""Whether a node can take part, and if not, what that means for the job."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pctool.errors import IncompleteError, PctoolError, UsageError
from pctool.node.checks import check_run_directory, check_script, check_torch
from pctool.node.config import LaunchConfig
from pctool.node.torchrun import bounded
from pctool.node.trouble import NodeTroubleError, UnseenError
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, NodeExit, read_claim, write_node_exit

_RECORD_S = 20.0  # for a record on the shared file system
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why this node cannot take part, and the cause that its record gets.

    `recorded`: it can write its record itself. `unseen`: it does not see the run directory; whether that is an error of
    the set-up is for node 0 to say, which sees the ledger.
    """

    error: PctoolError
    cause: str = "program-error"
    recorded: bool = True
    unseen: bool = False


def check_node(config: LaunchConfig, begin: Callable[[], None]) -> Claim | Refusal:
    """Check what this node needs, make its folders, and `begin`: write what a launch writes first. May take minutes.

    A node that came with a requeue may lack what all had before it. That is no error of the program, and the next
    attempt may get a better one.
    """
    try:
        claim = check_run_directory(config)
    except UnseenError as error:
        return Refusal(error=error, recorded=False, unseen=True)
    except UsageError as error:
        return Refusal(error=error, recorded=False)
    try:
        check_script(config)
        check_torch(config)
        _make_folders(config, begin)
    except UsageError as error:
        return Refusal(error=error, cause=_cause(config))
    except NodeTroubleError as error:
        return Refusal(error=error, cause="peer-lost")
    except OSError as error:
        cause = _cause(config) if error.errno in _FORBIDDEN else "peer-lost"
        return Refusal(error=_cannot_write(config, error), cause=cause, recorded=False)
    return claim


def _cause(config: LaunchConfig) -> str:
    """Return what an error of the set-up is: none if other nodes have had this job run before."""
    return "peer-lost" if has_started(config, job_only=True) else "program-error"


def has_started(config: LaunchConfig, *, job_only: bool) -> bool:
    """Return whether all launches of an earlier attempt were there: of the run, or only of this very job.

    Where the ledger cannot be read there is trouble with the file system, and what is wrong now may come of it.
    """
    try:
        events = [event for event in Ledger(config.run.ledger).read() if event.attempt != config.attempt]
    except OSError:
        return config.attempt > 0
    started = {event.attempt for event in events if event.event == "started"}
    job = config.environ.get("SLURM_JOB_ID")
    own = {event.attempt for event in events if event.event == "claim" and str(event.fields.get("job_id")) == job}
    return bool(started & own if job_only else started)


def record_refusal(environ: Mapping[str, str], error: PctoolError) -> None:
    """Leave the record of a launch that cannot even begin, where its environment says for which attempt and node."""
    run, number, node = (environ.get(name, "") for name in (env.RUN_DIR, env.ATTEMPT, "SLURMD_NODENAME"))
    if not run or not number.isdigit() or not node:
        return
    attempt = RunDir(Path(run)).attempt(int(number))
    record = NodeExit(
        node=node, cause="program-error", code=error.exit_code, time=round(time.time(), 3), why=error.what
    )

    def write() -> None:
        with suppress(OSError, IncompleteError):  # decide then finds no record, as of a lost node
            claim = read_claim(attempt)
            if claim is not None and claim.nonce == environ.get(env.NONCE):
                write_node_exit(attempt, record)

    bounded(write, _RECORD_S, None)


def _make_folders(config: LaunchConfig, begin: Callable[[], None]) -> None:
    config.run.logs(config.attempt).mkdir(parents=True, exist_ok=True)
    config.attempt_dir.nodes.mkdir(exist_ok=True)
    begin()


def _cannot_write(config: LaunchConfig, error: OSError) -> UsageError:
    return UsageError(
        f"node {config.name} cannot write: {error}",
        where=str(config.run.path),
        fix="make the run directory writable for this user on every node, and see that its disk is not full",
    )
