"""One simulated node: a small process that is to its node what init is to a machine.

It adopts every orphan below it (subreaper), so the node is exactly the tree under it: slurmd, the slurmstepd
processes (subreapers themselves, see conf.programs), the jobs. When a slurmstepd ends in any way, what its step may
have left is killed, as the cgroup of the step does on a real cluster. That is driven by SIGCHLD: between two ends
nothing runs here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pctool.slurm.private import proc

_STEP = re.compile(r"^slurmstepd: \[(?:.*:)?(\d+)(?:\+\d+)?\.(\w+)\]")
_ROUND_S = 0.005  # until the next look for a child forked by one that was just killed

Step = tuple[str, str]  # job id, step id or "batch"


def start(name: str, slurmd: Sequence[str], env: Mapping[str, str], out: Path) -> int:
    """Fork the node's init, which starts slurmd, and return its pid. The caller must be single-threaded.

    What slurmd prints goes to the end of `out`.
    """
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _run(name, slurmd, env, out, supervisor)
        except BaseException:  # noqa: BLE001  nothing may unwind into the supervisor's frames, of which this is a copy
            out.write_text(traceback.format_exc())
        finally:
            os._exit(70)
    return pid


def _run(name: str, slurmd: Sequence[str], env: Mapping[str, str], out: Path, supervisor: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    os.setsid()
    os.closerange(3, 4096)
    proc.become_subreaper()
    proc.die_with_parent(signal.SIGKILL, supervisor)
    proc.set_name(f"node {name.rpartition('-')[0][-6:]}-{name.rpartition('-')[2]}")
    with out.open("ab") as log:
        daemon = subprocess.Popen(
            slurmd, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_unblock
        )
    while True:
        signal.sigwait({signal.SIGCHLD})
        if _reap() - {daemon.pid}:
            _sweep(daemon.pid)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap() -> set[int]:
    """Collect every child that has ended."""
    ended: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.add(pid)


def _sweep(slurmd: int) -> None:
    """Kill what ended steps have left, until a look finds nothing more."""
    while victims := leftovers(os.getpid(), slurmd, proc.snapshot()):
        proc.send(victims, signal.SIGKILL)
        time.sleep(_ROUND_S)
        _reap()


def leftovers(init: int, slurmd: int, processes: Mapping[int, proc.Process]) -> set[int]:
    """Return the processes of a node that belong to no step that is still running.

    Under slurmd or a living slurmstepd nothing is a leftover. An orphan belongs to the step in its environment; one
    that hides its environment is kept as long as any step lives on the node, since it may be that step's.
    """
    keepers = {
        pid for pid, process in processes.items() if process.parent == init and pid != slurmd and _is_stepd(process)
    }
    keep = {slurmd, *keepers}.union(*(proc.descendants(pid, processes) for pid in (slurmd, *keepers)))
    live = {step for pid in keepers if (step := step_of_title(proc.arguments(pid)[0]))}
    return {
        pid for pid in set(proc.descendants(init, processes)) - keep if _ended(proc.environment(pid), live, keepers)
    }


def _is_stepd(process: proc.Process) -> bool:
    if process.state in "ZX":
        return False
    words = proc.arguments(process.pid)  # also before it is one: forked by slurmd, or still its wrapper
    return process.name in {"slurmd", "slurmstepd"} or any(
        word.endswith(("slurmstepd", "slurmd")) for word in words[:5]
    )


def _ended(env: Mapping[str, str], live: set[Step], keepers: set[int]) -> bool:
    step = step_of_environment(env)
    return not keepers if step is None else step not in live


def step_of_title(text: str) -> Step | None:
    """Read job and step from slurmstepd's title: `slurmstepd: [12.0]`, `slurmstepd: [12.batch]`."""
    match = _STEP.match(text)
    return (match[1], match[2]) if match else None


def step_of_environment(env: Mapping[str, str]) -> Step | None:
    """Read job and step from a process's environment; a batch script's has no step id."""
    job = env.get("SLURM_JOB_ID")
    return (job, env.get("SLURM_STEP_ID") or "batch") if job else None
