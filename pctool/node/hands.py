"""The hands of a launch: ranks, page, records, output. They do what the state machines ask for and decide nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from pctool.errors import IncompleteError
from pctool.node import actions as do
from pctool.node.config import LaunchConfig
from pctool.node.follow import Follower
from pctool.node.member import RanksEnd
from pctool.node.scribe import Scribe
from pctool.node.torchrun import RankPlan, Torchrun, bounded
from pctool.run import env as names
from pctool.run.layout import AttemptDir, write_atomic
from pctool.run.page import Page
from pctool.run.records import NodeExit, read_node_exit, write_node_exit

_RECORD_S = 20.0  # for a record on the shared file system; Slurm's KillWait is 30 s
_FLUSH_S = 5.0  # for the rest of rank 0's output


class Hands:
    """Act for one node. Use from the main thread alone: the ranks live as long as the thread that started them."""

    def __init__(
        self,
        config: LaunchConfig,
        *,
        scribe: Scribe,
        writers: str,
        emit: Callable[[str], None],
        on_ranks_end: Callable[[RanksEnd], None],
    ) -> None:
        self._config = config
        self._emit = emit
        self._scribe = scribe
        self._writers = writers
        self._on_ranks_end = on_ranks_end
        self._torchrun: Torchrun | None = None
        self._follower: Follower | None = None
        self._kill_at: float | None = None
        self._reached: set[int] = set()  # ranks that got the stop signal
        self.page = Page.create()
        self.instance: str | None = None

    def say(self, text: str) -> None:
        """Print and log one line."""
        self._emit(text)
        self._scribe.log(text)

    def write_start(self, torchrun_pid: int | None) -> None:
        """Write what others may want to know of this launch. Raise OSError."""
        record = {
            "pid": os.getpid(),
            "page": self.page.path,
            "host": socket.gethostname(),
            "node": self._config.name,
            "rank": self._config.node,
            "time": round(time.time(), 3),
            "instance_id": self.instance,
            "torchrun_pid": torchrun_pid,
        }
        write_atomic(self._config.attempt_dir.node_start(self._config.name), json.dumps(record).encode() + b"\n")

    def start_ranks(self, action: do.StartRanks) -> None:
        """Start torchrun; one of an earlier try is ended first."""
        config = self._config
        self.kill_ranks()
        logs = config.run.logs(config.attempt)
        plan = RankPlan(
            python=config.python,
            script=config.script,
            nodes=config.nodes,
            node=config.node,
            per_node=config.per_node,
            logs=logs,
            env={**config.environ, names.PAGE: self.page.path, names.WRITER: self._writers},
            module=config.module,
        )
        run_id = f"{config.environ.get('SLURM_JOB_ID', 'pctool')}-{config.attempt}-{action.try_}"
        try:
            if config.node == 0 and self._follower is None:
                self._follower = Follower(logs / "rank-0.log")
            self._torchrun = Torchrun(
                plan,
                try_=action.try_,
                address=action.address,
                port=action.port,
                run_id=run_id,
                on_end=self._on_ranks_end,
            )
        except OSError as error:
            # the interpreter and the folder were there a moment ago: the file system, or this node, is in trouble
            why = f"cannot start torchrun: {error}"
            self._on_ranks_end(RanksEnd(try_=action.try_, kind="failed", code=1, why=why, communication=True))
            return
        pid = self._torchrun.pid
        self.say(f"torchrun {pid}: {config.per_node} rank(s), logs in {logs}")
        self._scribe.put(lambda: self.write_start(pid))

    def request_stop(self, action: do.RequestStop) -> None:
        """Set the flag, and pass the stop on as a signal where the script wants one."""
        self.page.request_stop(reason=action.reason, deadline=action.deadline)
        self._pass_on_stop()

    def _pass_on_stop(self) -> None:
        """Send the stop signal to each rank once, as soon as it handles it: before, it would be lost, or deadly."""
        signum = self._config.stop_signal
        if signum is None or self._torchrun is None or not self.page.stop_requested:
            return
        reached = self._torchrun.signal_ranks(signum, besides=self._reached)
        if reached:
            self._reached |= reached
            self.say(f"{signum.name} to {len(reached)} rank(s)")

    def end_ranks(self) -> None:
        """Ask the ranks to end; they are killed if they have not in Timing.kill_s."""
        if self._torchrun is not None and self._kill_at is None:
            self._torchrun.terminate()
            self._kill_at = time.monotonic() + self._config.timing.kill_s

    def kill_ranks(self) -> None:
        """End torchrun, the ranks and all they started, at once."""
        self._kill_at = None
        if self._torchrun is not None:
            self._torchrun.kill()

    def tick(self, now: float) -> None:
        """Pass a stop on to ranks that can take it by now; kill ranks whose time is over."""
        self._pass_on_stop()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill_ranks()

    def record(self, node: str, record: do.Record) -> None:
        """Write how a node ended; wait for the file system, but not for ever."""
        value = NodeExit(
            node=node,
            cause=record.cause,
            code=record.code,
            time=round(time.time(), 3),
            why=record.why,
            saved=record.saved,
        )
        error = bounded(partial(_attempt, partial(_write_exit, self._config.attempt_dir, value)), _RECORD_S, "hangs")
        if error is not None:
            self.say(f"cannot write the record of {node}: {error}")

    def close(self) -> None:
        """End what is left, and let rank 0's output out."""
        self.kill_ranks()
        if self._follower is not None:
            self._follower.finish(_FLUSH_S)


def _write_exit(attempt: AttemptDir, value: NodeExit) -> None:
    """Write a record. An error that is there already stands: with two launches on a node, srun ends one for it."""
    if value.cause in {"signal", "peer-lost"}:
        with suppress(OSError, IncompleteError):
            if read_node_exit(attempt.node_exit(value.node)).cause == "program-error":
                return
    write_node_exit(attempt, value)


def _attempt(work: Callable[[], Any]) -> str | None:
    """Return what the file system said against it, or None."""
    try:
        work()
    except OSError as error:
        return str(error)
    return None
