"""Become a rank: send the output to the rank's own log, then be the training script. Started by torchrun, by path.

Usage: python rank.py LOG_FOLDER SCRIPT ARGUMENT...   (or: LOG_FOLDER -m MODULE ARGUMENT...)

The process stays the one torchrun started (exec), so that its signals and exit codes are the script's own.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
NO_LOG = "pctool: rank {} cannot open its log"


def main() -> None:
    """Open the log, tie this process to torchrun, and exec the script."""
    folder, *script = sys.argv[1:]
    log = os.path.join(folder, f"rank-{os.environ['RANK']}.log")
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        sys.exit(f"{NO_LOG.format(os.environ['RANK'])}: {error}")  # into torchrun's log
    sys.stdout.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # survives exec
    os.execv(sys.executable, [sys.executable, "-u", *script])


if __name__ == "__main__":
    main()
