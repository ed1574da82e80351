"""Tell a lost neighbour, or a lost store, from a broken program, by a rank's exit code and the end of its log.

When a node goes silently, the survivors die of communication errors within seconds; to call that a program error would
end the job for good. The texts are those of torch 2.6 to 2.13 (gloo, TCPStore, elastic: captured from killed peers;
NCCL: from reports of ncclRemoteError and of the watchdog).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

TAIL_BYTES = 65536  # of the log; a watchdog's dump with its C++ frames takes about 20 kB
_REASON = 300  # characters of the reason line

# A plain ConnectionResetError of Python is not here: a program that loses its data server has a program error.
_COMMUNICATION = re.compile(
    r"gloo/transport/"
    r"|Gloo connect(?:FullMesh|ion) "
    r"|DistNetworkError|DistStoreError"
    r"|ncclRemoteError|ncclSystemError|ncclInternalError"
    r"|remote process exited or there was a network error"
    r"|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
    r"|Rendezvous(?:Connection|Timeout|Closed|GracefulExit)Error"
    r"|TCPStore"
    r"|Timed out waiting \d+ms for (?:recv|send) operation"
    r"|failed to pass monitoredBarrier|monitoredBarrier, but received errors"
    r"|Socket Timeout|The client socket has (?:timed out|failed to connect)"
    r"|failed to recv, got 0 bytes"
)
# What pctool.train raises where the store went away between the claim and the restore: the next claim holds the job.
_STORE = re.compile(r"^pctool\.checkpoint\.\w+\.(?:StoreUnreadableError|BelowDurableError)\b")
# NCCL's wrong arguments and CUDA's errors are ours, even where the same line speaks of NCCL.
_PROGRAM = re.compile(
    r"ncclInvalidUsage|ncclInvalidArgument|ncclUnhandledCudaError|CUDA error|out of memory|OutOfMemory", re.IGNORECASE
)
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ABORT = re.compile(
    r"^\s*what\(\):|terminate called after throwing|Watchdog caught collective|terminated with exception"
)


_TEARDOWN = "terminate called without an active exception"
# A worker that dies of one of these was killed from outside: by the OOM killer, by Slurm, with its node.
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*killed by signal: (?:Killed|Terminated)")


@dataclass(frozen=True)
class Verdict:
    """Why a rank ended, and the line that says so.

    `communication`: its neighbours are the reason, or the store. `killed`: a signal is, of the rank or of a worker of
    its own. Neither: the program. `teardown`: it aborted while the interpreter was ending, so that its own exit code is
    lost; torch does that now and then where a script does not destroy its process group.
    """

    communication: bool
    reason: str
    killed: bool = False
    teardown: bool = False


def classify(code: int, tail: str) -> Verdict:
    """Judge a rank that ended with `code` (negative: killed by that signal) by the end of its log."""
    if code < 0 and -code != signal.SIGABRT:
        return Verdict(False, _signal_reason(-code), killed=True)
    lines = [_PREFIX.sub("", line.rstrip()) for line in tail.splitlines()]
    exceptions = _last_exceptions(lines)
    chain = exceptions or ([line for line in lines if _ABORT.search(line)] if code < 0 else [])
    if not chain and code < 0 and any(_TEARDOWN in line for line in lines[-5:]):
        return Verdict(False, _TEARDOWN, killed=True, teardown=True)
    if not chain and code < 0:
        return Verdict(False, _signal_reason(-code), killed=True)
    if not chain:
        # a SyntaxError of the script itself and argparse's errors come without a traceback
        last = next((line for line in reversed(lines) if line.strip()), "")
        return Verdict(False, _short(f"exit code {code}: {last}") if last else f"exit code {code}")
    if _STORE.match(chain[-1]):
        return Verdict(True, _short(chain[-1]))
    program = next((text for text in reversed(chain) if _PROGRAM.search(text)), None)
    if program is not None:
        return Verdict(False, _short(program), killed=not exceptions)
    communication = next((text for text in chain if _COMMUNICATION.search(text)), None)
    if communication is not None:
        return Verdict(True, _short(communication))
    return Verdict(False, _short(chain[-1]), killed=not exceptions or bool(_KILLED_WORKER.search(chain[-1])))


def classify_agent(kind: str, message: str) -> Verdict:
    """Judge a torchrun that ended by an exception of its own, before or between its ranks."""
    text = f"{kind}: {message}"
    return Verdict(bool(_COMMUNICATION.search(text)), _short(text))


def is_bind_failure(message: str) -> bool:
    """Return whether the rendezvous store could not listen on its port."""
    return "EADDRINUSE" in message or ("address already in use" in message.lower() and "listen" in message.lower())


def _signal_reason(signum: int) -> str:
    try:
        name = signal.Signals(signum).name
    except ValueError:
        name = f"signal {signum}"
    return f"killed by {name}" + (" (out of memory?)" if signum == signal.SIGKILL else "")


def _last_exceptions(lines: list[str]) -> list[str]:
    """Return the texts of the last traceback and of those it is chained to, oldest first; [] if there is none."""
    starts = [at for at, line in enumerate(lines) if line.strip() == _TRACEBACK]
    chain: list[str] = []
    for at in reversed(starts):
        text = _exception_after(lines, at)
        if text is not None:
            chain.insert(0, text)
        before = [line for line in lines[max(0, at - 3) : at] if line.strip()]
        if not before or before[-1].strip() not in _CHAINED:
            break
    return chain


def _exception_after(lines: list[str], start: int) -> str | None:
    """Return the exception that ends a traceback, with its further lines: messages may have several."""
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace() and _EXCEPTION.match(line):
            more = _until_blank(lines[at + 1 : at + 6])
            return " ".join([line, *more])
    return None


def _until_blank(lines: list[str]) -> list[str]:
    kept = []
    for line in lines:
        if not line.strip() or line.strip() == _TRACEBACK or line.startswith("terminate called"):
            break
        kept.append(line.strip())
    return kept


def _short(text: str) -> str:
    return text.strip()[:_REASON]
