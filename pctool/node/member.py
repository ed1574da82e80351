"""What one launch decides for its own node. A pure state machine, like the gang's."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pctool.aws.imds import Notice
from pctool.node.actions import Action, EndRanks, Exit, Record, RequestStop, Say, StartRanks, Tell, Timing
from pctool.node.wire import Message
from pctool.run.page import Outcome

TERMINATED = 128 + signal.SIGTERM
_STOPPED = {Outcome.STOPPED: True, Outcome.STOPPED_UNSAVED: False}  # outcome -> saved


@dataclass(frozen=True, kw_only=True)
class RanksEnd:
    """How torchrun and the ranks of a node ended."""

    try_: int
    kind: Literal["ok", "failed", "rendezvous", "bind-failed"]
    code: int = 0  # of the rank that failed first, 128+n for a signal
    why: str = ""
    communication: bool = False  # another node's end is the reason, not the program
    killed: bool = False  # a signal is the reason, and it was not ours
    teardown: bool = False  # the ranks aborted while their interpreters were ending, without an exception
    outcome: Outcome = Outcome.NONE


class Member:
    """One node's part of an attempt. `now` is a monotonic time."""

    def __init__(self, *, name: str, stop_signal: bool, timing: Timing) -> None:
        self._name = name
        self._stop_signal = stop_signal
        self._timing = timing
        self._try = 0  # of the torchrun that runs or ran
        self.running = False
        self._stop: str | None = None  # why the gang stops
        self._known: str | None = None  # a loss or failure elsewhere, once known
        self._end_at: float | None = None  # end the ranks then, unless they have ended
        self._ending: str | None = None  # why the ranks were ended
        self._signalled: int | None = None
        self._hub_gone = False
        self._released = False
        self._ended: Record | None = None
        self._leave_at: float | None = None  # without a release; None: a hub that beats is waited for
        self.exited = False

    # from this node
    def ready(self) -> list[Action]:
        """Say that this node can start: the checks are over, and a standing notice has been told."""
        return [Tell({"type": "ready", "name": self._name})]

    def refuse(self, record: Record, now: float, *, recorded: bool, unseen: bool = False) -> list[Action]:
        """End before the start: this node cannot take part. `recorded`: this node can write its own record.

        `unseen`: it does not see the run directory, and what that means is for the hub to say.
        """
        self._leave_at = now + self._timing.refuse_s
        return self._end(record, now, recorded=recorded, unseen=unseen)

    def notice(self, notice: Notice, clock: float) -> list[Action]:
        """Take a spot notice of this node. `clock` is now, in seconds since the epoch."""
        left = f"in {notice.time - clock:.0f} s" if notice.time else "at an unknown time"
        message = {"type": "notice", "name": self._name, "action": notice.action, "time": notice.time, "seen": clock}
        return [Tell(message), Say(f"spot notice: {notice.action} {left}")]

    def rebalance(self, when: float) -> list[Action]:
        """Take a rebalance recommendation of this node."""
        return [Tell({"type": "rebalance", "name": self._name, "time": when})]

    def signalled(self, signum: int, now: float) -> list[Action]:
        """Take a signal: USR1 and USR2 ask the gang to stop; any other ends the ranks at once, without a save.

        Slurm sends USR1 to launch where a script says `--signal=USR1@300` without `B:`.
        """
        name = signal.Signals(signum).name
        if signum in {signal.SIGUSR1, signal.SIGUSR2}:
            return [
                Say(f"{name}: asking the gang to stop"),
                Tell({"type": "stop", "why": "time-limit", "name": self._name}),
            ]
        if self._signalled is not None:
            return []
        self._signalled = signum
        if self._ended is not None:
            return self._exit()
        say = Say(f"{name}: ending the ranks without a save")
        if not self.running:
            return [say, *self._end(self._killed_record(), now)]
        # the record goes first: SIGKILL may follow within KillWait
        record = self._killed_record()
        return [say, record, *self._end_ranks(name)]

    def ranks_ended(self, end: RanksEnd, now: float) -> list[Action]:
        """Take the end of torchrun."""
        if end.try_ != self._try or not self.running:
            return []  # one that was replaced, on another port
        self.running = False
        if end.kind == "bind-failed":
            return [Tell({"type": "bind-failed", "try": end.try_})]
        stage = "rendezvous" if end.kind == "rendezvous" and self._ending is None else "ranks"
        return self._end(self._judge(end), now, stage=stage)

    # from the hub
    def said(self, message: Message, now: float) -> list[Action]:
        """Take a message of the hub. One of an unknown type is ignored."""
        handler: dict[str, Callable[[Message, float], list[Action]]] = {
            "start": self._start,
            "step-back": self._step_back,
            "stop": self._take_stop,
            "failed": self._failed,
            "terminate": self._terminate,
            "release": self._release,
        }
        take = handler.get(str(message.get("type")))
        return take(message, now) if take and not self.exited else []

    def hub_gone(self, why: str, now: float) -> list[Action]:
        """Take note that the hub cannot be reached any more: nobody will release us."""
        if self._hub_gone or self._released:
            return []
        self._hub_gone = True
        if self._ended is not None:
            return [Say(f"the hub is gone: {why}"), *self._exit()]
        return [Say(f"node 0 is lost: {why}"), *self._learn(f"node 0 is lost: {why}", self._timing.grace_s, now)]

    def tick(self, now: float) -> list[Action]:
        """Decide what time alone brings."""
        if self.running and self._end_at is not None and now >= self._end_at:
            self._end_at = None
            return [Say("the ranks hang: ending them"), *self._end_ranks(self._known or "overdue")]
        if self._leave_at is not None and not self.exited and now >= self._leave_at:
            return [Say(f"no release in {self._timing.refuse_s:g} s: ending without it"), *self._exit()]
        return []

    def _start(self, message: Message, now: float) -> list[Action]:
        try_ = int(message["try"])
        if try_ <= self._try or self._known is not None or self._signalled is not None:
            return []
        self._try, self.running = try_, True
        self._ended = None  # an early failure of the try before does not count
        return [StartRanks(try_, str(message["address"]), int(message["port"]))]

    def _step_back(self, message: Message, now: float) -> list[Action]:
        if self._ended is not None or self.running:
            return []
        why = f"{message.get('why')} on {message.get('node') or 'the run'}"
        return self._end(Record("stop", 0, why, saved=False), now)

    def _take_stop(self, message: Message, now: float) -> list[Action]:
        self._stop = str(message.get("why"))
        deadline = float(message.get("deadline") or 0.0)
        say = Say(f"stop requested: {self._stop} {message.get('node') or ''}".rstrip())
        return [RequestStop(self._stop, deadline), Tell({"type": "armed"}), say]

    def _failed(self, message: Message, now: float) -> list[Action]:
        if self._ended is not None:
            return []
        # the hub ends the ranks by `terminate`; the time here is for a hub that dies before it can
        return self._learn(str(message.get("why")), self._timing.save_grace_s + 2, now)

    def _learn(self, why: str, grace_s: float, now: float) -> list[Action]:
        self._known = self._known or why
        if not self.running:
            return self._end(Record("peer-lost", 1, self._known, saved=False), now) if self._ended is None else []
        self._end_at = min(self._end_at or now + grace_s, now + grace_s)
        return []

    def _terminate(self, message: Message, now: float) -> list[Action]:
        return self._end_ranks(str(message.get("why"))) if self.running else []

    def _release(self, message: Message, now: float) -> list[Action]:
        self._released = True
        if self._ended is not None:
            return self._exit()
        return self._end_ranks("released") if self.running else [self._killed_record(), *self._exit()]

    def _end_ranks(self, why: str) -> list[Action]:
        self._ending = self._ending or why
        return [EndRanks()]

    def _judge(self, end: RanksEnd) -> Record:
        """Return how this node ended, its first local cause."""
        if end.outcome in _STOPPED:  # saved or skipped as agreed; whatever broke in teardown changes nothing
            return Record("stop", 0, self._stop or "", saved=_STOPPED[end.outcome])
        if end.kind == "ok" or (end.teardown and self._expected(end)):
            stopped = self._stop is not None and self._stop_signal and end.outcome != Outcome.DONE
            # a script of its own that exits 0 after the signal has saved, as far as anybody can tell
            return Record("stop" if stopped else "done", 0, (self._stop or "") if stopped else "", saved=stopped)
        if self._signalled is not None:
            return self._killed_record()
        if self._known is not None and (self._ending is not None or end.communication or end.killed):
            return Record("peer-lost", 1, self._known, saved=False)
        if self._ending is not None:
            return Record("stop", 0, f"the ranks were ended: {self._ending}", saved=False)
        if end.communication or end.kind == "rendezvous":
            return Record("peer-lost", 1, end.why, saved=False)
        if end.killed:  # by the OOM killer, with its node, or by a fault of its own: decide looks at the code
            return Record("signal", end.code or 1, end.why, saved=False)
        return Record("program-error", end.code or 1, end.why, saved=False)

    def _expected(self, end: RanksEnd) -> bool:
        """Return whether the ranks had a reason to end, so that only their teardown went wrong."""
        return end.outcome == Outcome.DONE or (self._stop is not None and self._stop_signal)

    def _killed_record(self) -> Record:
        if self._known is not None:
            return Record("peer-lost", 1, self._known, saved=False)
        signum = self._signalled or signal.SIGTERM
        return Record("signal", 128 + signum, signal.Signals(signum).name, saved=False)

    def _end(
        self, record: Record, now: float, *, stage: str = "ranks", recorded: bool = True, unseen: bool = False
    ) -> list[Action]:
        self._ended = record
        saved = ", saved" if record.saved else ""
        message = {
            "type": "ended",
            "name": self._name,
            "stage": stage,
            "recorded": recorded,
            "unseen": unseen,
            "cause": record.cause,
            "code": record.code,
            "why": record.why,
        }
        actions: list[Action] = [Say(f"ended: {record.cause} ({record.code}){saved} {record.why}".rstrip())]
        actions += [record] if recorded else []
        actions += [Tell(message)]
        alone = self._hub_gone or self._released or self._signalled is not None
        return actions + (self._exit() if alone else [])

    def _exit(self) -> list[Action]:
        if self.exited:
            return []
        self.exited = True
        return [Exit(self._ended.code if self._ended else TERMINATED)]
