"""Tell a lost neighbour, or a lost store, from a broken program, by a rank's exit code and the end of its log.

When a node goes silently, the survivors die of communication errors within seconds; to call that a program error would
end the job for good. The texts are those of torch 2.6 to 2.13 (gloo, TCPStore, elastic: captured from killed peers;
NCCL: from reports of ncclRemoteError and of the watchdog).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

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
_STORE = re.compile(r"^pctool\.checkpoint\.\w+\.(?:StoreUnreadableError|BelowDurableError|ForeignCheckpointError)\b")
# NCCL's wrong arguments and CUDA's errors are ours, even where the same line speaks of NCCL.
_PROGRAM = re.compile(
    r"ncclInvalidUsage|ncclInvalidArgument|ncclUnhandledCudaError|CUDA error|out of memory|OutOfMemory", re.IGNORECASE
)
_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
# Python's own and rich's, which draws a box around it
_TRACEBACK = re.compile(r"^\s*(?:Traceback \(most recent call last\):$|[╭+].* Traceback \(most recent call last\))")
# Tracebacks of what went on beside the main thread, or after it: clean-up breaks when its rank has died of something.
_BESIDE = re.compile(r"^(?:Exception ignored |Exception in thread |Error in atexit|Process \S+:$)")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_ABORT = re.compile(
    r"^\s*what\(\):|terminate called after throwing|Watchdog caught collective|terminated with exception"
)
_MESSAGE_LINES = 5  # of an exception, besides the first
_LAST_LINES = 10  # of a log without a traceback
# What comes after an uncaught exception without a word of the script: torch's and NCCL's warnings, wandb's farewell.
_AFTERMATH = re.compile(r"^(?:\s|\[[IWEF][\d ]|frame #|terminate called|wandb: )|NCCL (?:INFO|WARN)")
_WARNING = re.compile(r"^(?:\[[IW][\d ]|frame #)")
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}

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
    if code < 0 and -code not in {signal.SIGABRT, *_CRASHES}:
        return Verdict(False, _signal_reason(-code), killed=True)
    every = [_PREFIX.sub("", line.rstrip()) for line in tail.splitlines()]
    lines = _without_beside(every)
    chain, after = _last_exceptions(lines)
    verdict = _judge(chain) if chain else None
    if verdict is not None and verdict.communication:
        return verdict
    if -code in _CRASHES:
        return Verdict(False, _signal_reason(-code), killed=True)
    if code < 0:
        return _aborted(-code, verdict, lines[after:])
    return verdict or _without_traceback(code, lines, _last_exceptions(every)[0])


def _judge(chain: list[str]) -> Verdict:
    """Judge by the texts of a chain of exceptions, oldest first, or by the lines of an abort."""
    if _STORE.match(chain[-1]):
        return Verdict(True, _short(chain[-1]))
    program = next((text for text in reversed(chain) if _PROGRAM.search(text)), None)
    if program is not None:
        return Verdict(False, _short(program))
    communication = next((text for text in chain if _COMMUNICATION.search(text)), None)
    if communication is not None:
        return Verdict(True, _short(communication))
    return Verdict(False, _short(chain[-1]), killed=bool(_KILLED_WORKER.search(chain[-1])))


def _aborted(signum: int, verdict: Verdict | None, after: list[str]) -> Verdict:
    """Judge an abort by what was written `after` the last traceback, and by the verdict on that, if there is one.

    A traceback that the script caught and logged says nothing of the abort. NCCL's watchdog has the last word: it ends
    the rank minutes after whatever else went wrong.
    """
    aborts = [line for line in after if _ABORT.search(line)]
    abort = replace(_judge(aborts), killed=True) if aborts else None
    if abort is not None and abort.communication:
        return replace(abort, killed=False)
    if verdict is not None and not _went_on(after):
        return verdict
    if abort is None and any(_TEARDOWN in line for line in after[-5:]):
        return Verdict(False, _TEARDOWN, killed=True, teardown=True)
    return abort or verdict or Verdict(False, _signal_reason(signum), killed=True)


def _went_on(after: list[str]) -> bool:
    """Return whether the script wrote on after its last traceback: it had caught and logged that one."""
    words = [line for line in after if line and not _AFTERMATH.search(line) and not _ABORT.search(line)]
    return len(words) > _MESSAGE_LINES  # so many may belong to the exception's message


def _without_traceback(code: int, lines: list[str], beside: list[str]) -> Verdict:
    """Judge an exit without a traceback of the main thread: it was written in another form, or not at all."""
    last = [line for line in lines if line.strip() and not _WARNING.search(line)][-_LAST_LINES:]
    if not any(_PROGRAM.search(line) for line in last):
        communication = next((line for line in last if _COMMUNICATION.search(line)), None)
        if communication is not None:
            return Verdict(True, _short(communication))
    if beside:
        return _judge(beside)
    # a SyntaxError of the script itself and argparse's errors come without a traceback
    return Verdict(False, _short(f"exit code {code}: {last[-1]}") if last else f"exit code {code}")


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


def _without_beside(lines: list[str]) -> list[str]:
    """Leave out the tracebacks of other threads and of clean-up."""
    kept: list[str] = []
    at = 0
    while at < len(lines):
        beside = _BESIDE.match(lines[at]) and any(_TRACEBACK.match(line) for line in lines[at + 1 : at + 3])
        if beside:
            at = _end_of_chain(lines, at + 1)
        else:
            kept.append(lines[at])
            at += 1
    return kept


def _end_of_chain(lines: list[str], start: int) -> int:
    """Return where a traceback and those chained to it have ended: the line after the last exception's first."""
    found = _exception_after(lines, start)
    while found is not None:
        end = found[0] + 1
        following = next((at for at in range(end, len(lines)) if _TRACEBACK.match(lines[at])), None)
        if following is None or not _is_chained(lines, following):
            return end
        found = _exception_after(lines, following)
    return len(lines)


def _last_exceptions(lines: list[str]) -> tuple[list[str], int]:
    """Return the texts of the last traceback and of those it is chained to, oldest first, and where it has ended.

    ([], 0) if there is none.
    """
    starts = [at for at, line in enumerate(lines) if _TRACEBACK.match(line)]
    chain: list[str] = []
    after = 0
    for at in reversed(starts):
        found = _exception_after(lines, at)
        if found is not None:
            chain.insert(0, found[1])
            after = after or found[0] + 1
        if not _is_chained(lines, at):
            break
    return chain, after


def _is_chained(lines: list[str], start: int) -> bool:
    """Return whether the traceback that starts there follows from the one before it."""
    before = [line for line in lines[max(0, start - 3) : start] if line.strip()]
    return bool(before) and before[-1].strip() in _CHAINED


def _exception_after(lines: list[str], start: int) -> tuple[int, str] | None:
    """Return the line of the exception that ends a traceback, and its text: messages may have several lines."""
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace() and _EXCEPTION.match(line):
            more = _until_blank(lines[at + 1 : at + 1 + _MESSAGE_LINES])
            return at, " ".join([line, *more])
    return None


def _until_blank(lines: list[str]) -> list[str]:
    kept = []
    for line in lines:
        if not line.strip() or _TRACEBACK.match(line) or line.startswith("terminate called") or _BESIDE.match(line):
            break
        kept.append(line.strip())
    return kept


def _short(text: str) -> str:
    return text.strip()[:_REASON]
