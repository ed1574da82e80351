"""Processes as /proc shows them: trees, environments, and killing a tree until nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pctool.errors import SlurmError

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_ROUND_S = 0.005  # between two looks at a tree that is being killed: reaping takes about a millisecond


@dataclass(frozen=True)
class Process:
    """One process: its parent, the kernel's short name, its state letter."""

    pid: int
    parent: int
    name: str
    state: str


def snapshot() -> dict[int, Process]:
    """Return every process by pid. About 10 us a process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read(int(entry))):
            found[process.pid] = process
    return found


def read(pid: int) -> Process | None:
    """Return one process, a zombie too; None when it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold blanks and parentheses
    state, parent = tail.split()[:2]
    return Process(pid, int(parent), head.partition("(")[2], state)


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it has ended. With the pid it names one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] in (b"Z", b"X") else int(words[19])  # fields 3 and 22 of proc_pid_stat(5)


def descendants(root: int, processes: Mapping[int, Process]) -> list[int]:
    """Return the pids below `root`, parents before their children, without root, without zombies."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    level = children.get(root, [])
    while level:
        found += level
        level = [child for pid in level for child in children.get(pid, ())]
    return [pid for pid in found if processes[pid].state not in "ZX"]


def environment(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty when it has gone or may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in words if word)
    return {key: value for key, _, value in pairs}


def arguments(pid: int) -> list[str]:
    """Return the command line a process shows; slurmstepd writes its step there: `slurmstepd: [12.0]`."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        return [""]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def kill_below(root: int, *, reap: Callable[[], None] = lambda: None, timeout: float = 20.0) -> None:
    """SIGKILL everything below `root` until nothing is left; `root` itself stays.

    All are stopped before the first is killed, so that none of them sees another die and tells the controller: a lost
    machine says nothing. Children are killed before their parents: where a parent goes first, the kernel wakes a
    stopped group that has become an orphan (SIGHUP, SIGCONT), and an srun in it would report. `reap` is called in each
    round, for roots that are this very process. Raises SlurmError if something is still there after `timeout` seconds
    (only the kernel can hold a process that long).
    """
    for _ in range(2):  # twice: what was forked while the first list was read
        send(descendants(root, snapshot()), signal.SIGSTOP)
    end = time.monotonic() + timeout
    while alive := descendants(root, snapshot()):
        send(reversed(alive), signal.SIGKILL)
        if time.monotonic() > end:
            raise SlurmError(f"processes do not die of SIGKILL: {sorted(alive)}", fix="look for a hanging file system")
        reap()
        time.sleep(_ROUND_S)
    reap()


def become_subreaper() -> None:
    """Make orphans below this process its own children, so that none can leave the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Get `number` when the parent ends, also when it is killed; `parent` is its pid, known before the fork."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it has ended between the fork and here
        os.kill(os.getpid(), number)


def set_name(name: str) -> None:
    """Set what `ps -o comm` shows; 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise SlurmError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
