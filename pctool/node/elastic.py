"""Run torchrun and report how its ranks ended. Started by path with the user's interpreter, which may lack pctool.

Usage: python elastic.py PARENT_PID REPORT_FD MODULE ARGUMENT...

torchrun turns every rank's exit code into 1 and prints the rest for people. Its exception knows more: which rank failed
first, with which code. That goes to REPORT_FD as one JSON object.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are none of torchrun's business

import ctypes
import json
import os
import runpy
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end at once if it has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run MODULE as __main__; its exception or exit code goes on after the report."""
    parent, fd, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(fd, False)
    die_with_parent(parent)
    # A signal that Slurm sends to the whole step (--signal without B:) is launch's to hear. The ranks inherit this;
    # a script that wants the signal sets its own handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.argv[:] = sys.argv[3:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in {None, 0}):
            os.write(fd, json.dumps(_report(error)).encode())
        raise


def _report(error: BaseException) -> dict[str, object]:
    """Return the exception's name and message, and the failures that torchrun's ChildFailedError carries."""
    failures = getattr(error, "failures", None) or {}
    return {
        "kind": type(error).__name__,
        "message": str(error)[:4000],
        "failures": [
            {"rank": int(rank), "code": int(failure.exitcode), "time": int(failure.timestamp)}
            for rank, failure in list(failures.items())[:64]
        ],
    }


if __name__ == "__main__":
    main()
