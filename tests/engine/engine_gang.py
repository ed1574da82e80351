"""Start gangs of real ranks on this machine, find their writers, kill and stop them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from engine_ranks import Job, Progress, main, train

from pctool.checkpoint.lineage import look
from pctool.checkpoint.stores import PosixStore, order
from pctool.node.config import LaunchConfig
from pctool.node.writers import Writers
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.page import Page

LIMIT_S = 120.0
_POLL_S = 0.002  # what is waited for is memory or /proc: there is nothing to be woken by

_RANKS = multiprocessing.get_context("forkserver")  # ranks are forks of one that has torch already
_RANKS.set_forkserver_preload(["torch", "pctool.train", "torch.distributed.device_mesh", "torch.distributed.tensor"])


def wait_for(what: str, check: Callable[[], Any], seconds: float = LIMIT_S) -> None:
    """Wait until `check` returns something true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(_POLL_S)


@dataclass
class Gang:
    """One attempt: its ranks, and their writers (launch's with `served`, else each rank's own)."""

    run: RunDir
    attempt: int
    scratch: Path
    world: int = 2
    served: bool = False
    job: dict[str, Any] = field(default_factory=dict)
    body: Callable[[Job], None] = train
    environ: dict[str, str] = field(default_factory=dict)
    ranks: list[BaseProcess] = field(default_factory=list)
    writers: Writers | None = None
    said: list[str] = field(default_factory=list)

    def start(self) -> Gang:
        """Start all ranks."""
        self.run.attempt(self.attempt).path.mkdir(parents=True, exist_ok=True)
        self.run.logs(self.attempt).mkdir(parents=True, exist_ok=True)
        self.page = Page.create()
        if self.served:
            self.writers = Writers(self._launch(), say=self.said.append)
            self.writers.start()
        jobs = [self._job(rank, _free_port_of(self)) for rank in range(self.world)]
        self.progress = [Progress(job.progress) for job in jobs]
        self.ranks = [_RANKS.Process(target=main, args=(job, self.body), daemon=True) for job in jobs]
        for process in self.ranks:
            process.start()
        return self

    def await_step(self, step: int) -> None:
        """Wait until every rank has entered the body of `step`."""
        wait_for(f"step {step}", lambda: self._alive() and all(rank.begun >= step for rank in self.progress))

    def await_commit(self, step: int) -> None:
        """Wait until a checkpoint of `step` or later is complete, as launch sees it."""
        wait_for(f"a checkpoint of step {step}", lambda: self._alive() and self.page.committed >= step)

    def writer_pids(self) -> list[int]:
        """Return the writers that are alive, oldest first; with `served`, without their server."""
        server = self.server_pid()
        return sorted(pid for pid in _writers_of(self.run, self.attempt) if pid != server)

    def writer_of(self, rank: int) -> int | None:
        """Return the pid of a rank's own writer, None where it is launch's, or has gone."""
        parent = self.ranks[rank].pid
        return next((pid for pid in self.writer_pids() if _parent(pid) == parent), None)

    def server_pid(self) -> int | None:
        """Return the pid of launch's server of writers."""
        process = self.writers._process if self.writers is not None else None
        return process.pid if process is not None and process.poll() is None else None

    def stop(self, deadline: float = 0.0) -> None:
        """Ask for a stop as launch does."""
        self.page.request_stop(reason="notice", deadline=deadline)
        self.page.allow_publish()

    def signal_ranks(self, signum: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to ranks."""
        for rank in range(self.world) if ranks is None else ranks:
            send(self.ranks[rank].pid, signum)

    def end(self, seconds: float = LIMIT_S) -> list[int | None]:
        """Wait for all ranks, then for all writers, to end; return the ranks' exit codes."""
        limit = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0.0, limit - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        assert None not in codes, f"ranks have not ended: {codes}\n{self.log()}"
        wait_for("the end of all writers", lambda: not self.writer_pids(), max(1.0, limit - time.monotonic()))
        self.close()
        return codes

    def close(self) -> None:
        """Kill what is left."""
        for process in self.ranks:
            if process.is_alive():
                process.kill()
                process.join()
        for pid in _writers_of(self.run, self.attempt):
            send(pid, signal.SIGKILL)
        if self.writers is not None:
            self.writers.close()
            self.writers = None

    def log(self, rank: int | None = None) -> str:
        """Return what a rank, or all, printed."""
        ranks = range(self.world) if rank is None else [rank]
        paths = [self._path(one, "log") for one in ranks]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths if path.exists())

    def _alive(self) -> bool:
        dead = [rank for rank, process in enumerate(self.ranks) if process.exitcode not in {None, 0}]
        assert not dead, f"ranks {dead} have ended\n{self.log()}"
        return True

    def _path(self, rank: int, kind: str) -> Path:
        return self.scratch / f"{self.attempt:06d}-rank{rank}.{kind}"

    def _job(self, rank: int, port: int) -> Job:
        environ = {
            env.RUN_DIR: str(self.run.path),
            env.ATTEMPT: str(self.attempt),
            env.PAGE: self.page.path,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            **self.environ,
        }
        if self.writers is not None:
            environ[env.WRITER] = self.writers.address
        return Job(environ=environ, log=self._path(rank, "log"), progress=self._path(rank, "progress"), **self.job)

    def _launch(self) -> LaunchConfig:
        return LaunchConfig(
            run=self.run,
            attempt=self.attempt,
            nonce="",
            hub_host="127.0.0.1",
            hub_port=0,
            node=0,
            nodes=1,
            name="node",
            per_node=self.world,
            python="python",
            script=(),
            stop_signal=None,
            poll_s=1.0,
            imds="",
            notice_file=self.scratch / "notice",
            store=None,
            environ={**os.environ, env.RUN_DIR: str(self.run.path), env.ATTEMPT: str(self.attempt)},
        )


_PORTS: dict[tuple[Path, int], int] = {}


def _free_port_of(gang: Gang) -> int:
    key = (gang.run.path, gang.attempt)
    if key not in _PORTS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            _PORTS[key] = int(probe.getsockname()[1])
    return _PORTS[key]


def send(pid: int | None, signum: int) -> None:
    """Send a signal to a process, if it is still there."""
    if pid is not None:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def complete_steps(run: RunDir) -> dict[str, int]:
    """Return the complete checkpoints of a run, name -> step, by the one predicate."""
    store = PosixStore(run.checkpoints)
    return {name: order(name)[1] for name in store.names() if look(store, name).ok}


def events(run: RunDir, *kinds: str, attempt: int | None = None) -> list[Event]:
    """Return the ledger's events of some kinds."""
    found = [event for event in Ledger(run.ledger).read() if event.event in kinds]
    return [event for event in found if attempt is None or event.attempt == attempt]


def _writers_of(run: RunDir, attempt: int) -> list[int]:
    """Return all processes that run a writer for this attempt: what they inherited of the environment says so."""
    wanted = {f"{env.RUN_DIR}={run.path}".encode(), f"{env.ATTEMPT}={attempt}".encode()}
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if b"pctool.checkpoint.writer" in line and wanted <= set(environ):
                    found.append(int(name))
            except OSError:
                continue  # it has ended
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
