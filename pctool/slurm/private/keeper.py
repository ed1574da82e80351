"""The outermost process of a private cluster: it sees to it that nothing of the cluster is left, whatever happens.

Everything the cluster starts is below it, orphans too (subreaper). It waits for the first of: the supervisor's end,
the end of the owner, the closed pipe from the owner, a signal. Then it kills everything below it, removes the folder,
and ends. If it is itself killed, the supervisor gets SIGTERM from the kernel and does the same.

Run as `python -m pctool.slurm.private.keeper`; the ClusterConfig comes pickled on standard input, what became of the
start goes as one JSON line to standard output.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from pctool.slurm.private import proc
from pctool.slurm.private.config import ClusterConfig
from pctool.slurm.private.supervisor import serve

_POLL_S = 1.0  # how often the owner is looked for where the kernel has no pidfd (before Linux 5.3)


def main() -> int:
    """Keep one cluster; return when nothing of it is left."""
    config: ClusterConfig = pickle.load(sys.stdin.buffer)
    os.chdir("/")
    os.umask(0o022)
    proc.become_subreaper()
    proc.set_name("pctool-keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keeper = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(config, keeper)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the supervisor alone reports
    try:
        _wait(config, supervisor)
    finally:
        _clean(config.folder)
    return 0


def _supervise(config: ClusterConfig, keeper: int) -> None:
    """Be the supervisor: it too can clean up, should the keeper be killed."""
    code = 1
    try:
        proc.die_with_parent(signal.SIGTERM, keeper)
        proc.become_subreaper()
        proc.set_name("pctool-cluster")
        os.dup2(os.open(config.folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve(config, _report)
        code = 0
    finally:
        sys.stderr.flush()
        if os.getppid() != keeper:
            _clean(config.folder)
        os._exit(code)


def _report(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _wait(config: ClusterConfig, supervisor: int) -> None:
    """Return when the cluster has to end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watched = [_pidfd(supervisor)]
    if config.owner is not None:
        watched += [0, _pidfd(config.owner)]
    files = [file for file in watched if file is not None]
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN | select.POLLHUP)
    while not poll.poll(None if None not in watched else _POLL_S * 1000):
        if not _alive(supervisor) or (config.owner is not None and not _alive(config.owner)):
            return


def _pidfd(pid: int) -> int | None:
    """Return a file that becomes readable when the process ends; None where the kernel has none. -1 fd never occurs."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.open(os.devnull, os.O_RDONLY)  # it has ended already: always readable
    except OSError:
        return None


def _alive(pid: int) -> bool:
    found = proc.read(pid)
    return found is not None and found.state not in "ZX"


def _clean(folder: Path) -> None:
    """Kill everything below this process and remove the folder."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    proc.kill_below(os.getpid(), reap=_reap)
    shutil.rmtree(folder, ignore_errors=True)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
