"""torchrun and the ranks of one node, as processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pctool.node import elastic, procs, rank
from pctool.node.classify import TAIL_BYTES, Verdict, classify, classify_agent, is_bind_failure
from pctool.node.member import RanksEnd

MODULE = "torch.distributed.run"
_READ_S = 10.0  # for the log's end; the file system may hang just when a node is lost

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What torchrun starts on this node. `script` is what Python is given: a file or `-m module`, and arguments."""

    python: str
    script: tuple[str, ...]
    nodes: int
    node: int
    per_node: int
    logs: Path
    env: Mapping[str, str]
    module: str = MODULE


def arguments(plan: RankPlan, *, address: str, port: int, run_id: str) -> list[str]:
    """Return torchrun's arguments: static rendezvous, so that node 0 has rank 0, and no restarts inside the job."""
    return [
        f"--nnodes={plan.nodes}",
        f"--node-rank={plan.node}",
        f"--nproc-per-node={plan.per_node}",
        f"--master-addr={address}",
        f"--master-port={port}",
        f"--rdzv-id={run_id}",
        "--max-restarts=0",
        "--",  # else torchrun takes a script's flag for a prefix of one of its own (--log, --local, --s)
        rank.__file__,
        str(plan.logs),
        *plan.script,
    ]


class Torchrun:
    """One torchrun. Start it from a thread that lives as long as it: the kernel ends it with that thread."""

    def __init__(
        self, plan: RankPlan, *, try_: int, address: str, port: int, run_id: str, on_end: Callable[[RanksEnd], None]
    ) -> None:
        self._plan = plan
        self.try_ = try_
        self._on_end = on_end
        self._report, told = os.pipe()
        head = [plan.python, "-u", elastic.__file__, str(os.getpid()), str(told), plan.module]
        log = os.open(plan.logs / f"torchrun-{plan.node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._process = subprocess.Popen(
                head + arguments(plan, address=address, port=port, run_id=run_id),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(plan.env),
                pass_fds=(told,),
                start_new_session=True,
            )
        finally:
            os.close(told)
            os.close(log)
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name=f"torchrun-{try_}", daemon=True).start()

    def ranks(self) -> list[int]:
        """Return the rank processes: torchrun's children that it gave a LOCAL_RANK."""
        return [pid for pid in procs.children(self.pid) if procs.has_environment(pid, "LOCAL_RANK")]

    def signal_ranks(self, signum: signal.Signals, *, besides: set[int]) -> set[int]:
        """Send a signal to the ranks that have a handler for it; return which.

        Never to torchrun or a group, nor to those `besides`.
        """
        ranks = [pid for pid in self.ranks() if pid not in besides and procs.handles(pid, signum)]
        procs.send(ranks, signum)
        return set(ranks)

    def terminate(self) -> None:
        """Ask ranks and torchrun to end."""
        procs.send([*self.ranks(), self.pid], signal.SIGTERM)

    def kill(self) -> None:
        """End torchrun, the ranks, and all they started, at once. One that has ended has nothing left: see rank.py."""
        if self._process.poll() is None:
            below = procs.descendants(self.pid)
            self._process.kill()
            procs.send(below, signal.SIGKILL)

    def _wait(self) -> None:
        code = self._process.wait()
        report = _read_report(self._report)
        self._on_end(judge(self._plan, self.try_, code, report))


def judge(plan: RankPlan, try_: int, code: int, report: Mapping[str, Any]) -> RanksEnd:
    """Return how the ranks ended, by torchrun's exit code, its report, and the logs of the ranks that failed."""
    if code == 0:
        return RanksEnd(try_=try_, kind="ok")
    failures = sorted(report.get("failures", []), key=lambda failure: (failure["time"], failure["rank"]))
    if failures:
        return _judge_ranks(plan, try_, failures)
    kind, message = str(report.get("kind", "")), str(report.get("message", ""))
    if is_bind_failure(message):
        return RanksEnd(try_=try_, kind="bind-failed", code=1, why=message[:300])
    if kind:
        verdict = classify_agent(kind, message)
        why = f"torchrun: {verdict.reason}{_last_words(plan)}"
        if verdict.communication:
            return RanksEnd(try_=try_, kind="rendezvous", code=1, why=why, communication=True)
        terminated = kind == "SignalException"  # torchrun got a SIGTERM
        code = 128 + signal.SIGTERM if terminated else 1
        return RanksEnd(try_=try_, kind="failed", code=code, why=why, killed=terminated)
    why = f"torchrun ended with {code} and without a report{_last_words(plan)}"
    return RanksEnd(try_=try_, kind="failed", code=_shell_code(code), why=why, killed=code < 0)


def _last_words(plan: RankPlan) -> str:
    """Return the last line of torchrun's own log, where its own errors are, as a tail of a reason."""
    log = plan.logs / f"torchrun-{plan.node}.log"
    lines = bounded(functools.partial(read_tail, log), _READ_S, "").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({log.name}: {last[:200]})" if last else ""


def _unopened(plan: RankPlan, rank_number: int) -> str:
    """Return what a rank wrote into torchrun's log because its own could not be opened; '' if it could."""
    text = bounded(functools.partial(read_tail, plan.logs / f"torchrun-{plan.node}.log"), _READ_S, "")
    mark = rank.NO_LOG.format(rank_number) + ":"
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.startswith(mark)), "")


def _judge_ranks(plan: RankPlan, try_: int, failures: list[dict[str, int]]) -> RanksEnd:
    """Name the first rank that failed by itself, else that was killed; one that lost its neighbour only if all did."""
    judged = []
    for failure in failures:
        log = plan.logs / f"rank-{failure['rank']}.log"
        tail = bounded(functools.partial(read_tail, log), _READ_S, "")
        unopened = "" if tail else _unopened(plan, failure["rank"])
        verdict = Verdict(True, unopened) if unopened else classify(failure["code"], tail)
        judged.append((failure, verdict))
    failure, verdict = min(judged, key=lambda pair: (pair[1].communication, pair[1].killed))
    return RanksEnd(
        try_=try_,
        kind="failed",
        code=_shell_code(failure["code"]),
        why=f"rank {failure['rank']}: {verdict.reason}",
        communication=verdict.communication,
        killed=verdict.killed,
        teardown=all(verdict.teardown for _, verdict in judged),
    )


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a log; '' if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def bounded(work: Callable[[], T], seconds: float, otherwise: U) -> T | U:
    """Return what `work` returns, or `otherwise` if it takes longer: it goes on in a thread nobody waits for."""
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else otherwise


def _read_report(fd: int) -> dict[str, Any]:
    """Read what elastic.py wrote; {} if it was killed before. The pipe is at its end: its only writer is gone."""
    with os.fdopen(fd, "rb") as pipe, contextlib.suppress(ValueError):
        report = json.loads(pipe.read())
        return report if isinstance(report, dict) else {}
    return {}


def _shell_code(code: int) -> int:
    """Return an exit code as shells have it: 128+n for a signal."""
    return 128 - code if code < 0 else code
