"""What the hub decides for the whole gang: start, stop, loss, end. A pure state machine.

Events come in as method calls with the current times, decisions go out as actions. `now` is a monotonic time;
deadlines are seconds since the epoch and are compared with `clock`. Node 0's own launch talks to it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pctool.node.actions import Action, Arm, AskLimit, Enter, FinishMirror, Record, RecordFor, Say, Tell, Timing
from pctool.node.wire import Message
from pctool.run.stop import StopRequest

MAX_TRIES = 5  # ports tried for the rendezvous
_FAILURES = {"program-error", "peer-lost", "signal"}


@dataclass(frozen=True)
class Times:
    """The two clocks, read together."""

    now: float  # monotonic
    clock: float  # seconds since the epoch


@dataclass(frozen=True)
class PageView:
    """What node 0's page says, where the coordinator needs it."""

    saving: bool = False  # the ranks are needed for a save
    writing: bool = False  # the writers are at work on one, and need no rank
    ended: bool = False  # the ranks have said how they end: whatever is committed is


class Gang:
    """The coordinator of one attempt."""

    def __init__(self, *, nodes: int, address: str, free_port: Callable[[], int], timing: Timing, times: Times) -> None:
        self._nodes = nodes
        self._address = address
        self._free_port = free_port
        self.claimed = times.clock  # when the attempt was claimed
        self._timing = timing
        self._began = times.now
        self.names: dict[int, str] = {}  # of the launches that are ready
        self._try = 0  # 0: torchrun is not started yet
        self._away: dict[int, float] = {}  # launches that left before the start, and when
        self._standing: StopRequest | None = None  # a reason not to start
        self._standing_at = 0.0
        self._stop: StopRequest | None = None
        self._stop_at = 0.0
        self._over_at: float | None = None  # since when nobody but the writers is at work
        self._limit = 0.0  # when Slurm ends the job, if a stop has told it; 0: not known
        self._asked_limit = False
        self._acks: set[int] = set()
        self._armed = False
        self._started_before: bool | None = None  # an earlier attempt had all its launches; None: not known yet
        self._unseen: dict[int, Message] = {}  # ends that wait for it
        self.ended: dict[int, str] = {}  # node -> cause
        self.lost: dict[int, str] = {}  # node -> why
        self._early: dict[int, tuple[float, Message]] = {}  # torchruns that failed before their ranks ran
        self._failed: str | None = None  # cause of the gang's failure
        self._failed_at = 0.0
        self._verdict: Message | None = None  # what ended the attempt before the start
        self._page = PageView()
        self._page_ended_at: float | None = None
        self._terminated = False
        self._finishing_at: float | None = None
        self._mirrored = False
        self.released = False

    # events
    def said(self, node: int, message: Message, times: Times) -> list[Action]:
        """Take a launch's message. One of an unknown type is ignored: a newer launch may send it."""
        handler: dict[str, Callable[[int, Message, Times], list[Action]]] = {
            "ready": self._ready,
            "notice": self._notice,
            "rebalance": self._rebalance,
            "stop": self._asked,
            "armed": self._ack,
            "bind-failed": self._bind_failed,
            "ended": self._ended,
        }
        take = handler.get(str(message.get("type")))
        return [*(take(node, message, times) if take else []), *self.tick(times)]

    def joined(self, node: int) -> None:
        """Take note that a launch is (again) connected."""
        self._away.pop(node, None)

    def gone(self, node: int, why: str, times: Times) -> list[Action]:
        """Take note that a launch's connection is gone. Before it was ready it may come again; later it is lost."""
        if self.released or node in self.ended or node in self.lost:
            return []
        if node not in self.names:
            self._away[node] = times.now
            return []
        return [*self._lose(node, why, times), *self.tick(times)]

    def stop_file(self, request: StopRequest, times: Times) -> list[Action]:
        """Take the stop file."""
        return [*self._request(request, times), *self.tick(times)]

    def history(self, started: bool, times: Times) -> list[Action]:
        """Take whether an earlier attempt of this run has started."""
        self._started_before = started
        waiting, self._unseen = self._unseen, {}
        actions = [a for node, message in waiting.items() for a in self._ended(node, message, times)]
        return [*actions, *self.tick(times)]

    def page(self, view: PageView, times: Times) -> list[Action]:
        """Take what node 0's page says."""
        if view.ended and self._page_ended_at is None:
            self._page_ended_at = times.now
        self._page = view
        return self.tick(times)

    def mirror_finished(self, times: Times) -> list[Action]:
        """Take note that the mirror has nothing left to do, or cannot."""
        self._mirrored = True
        return self.tick(times)

    def tick(self, times: Times) -> list[Action]:
        """Decide what time alone brings. To be called several times a second."""
        if self.released:
            return []
        if self._try == 0 and self._failed is None and not self.ended:
            return self._gather(times)
        return [*self._ripen(times), *self._overdue(times), *self._finish(times)]

    # start
    def _ready(self, node: int, message: Message, times: Times) -> list[Action]:
        self.names[node] = str(message.get("name", node))
        self._away.pop(node, None)
        return [Tell(self._verdict)] if self._verdict is not None else []  # it came late and has not heard

    def _gather(self, times: Times) -> list[Action]:
        waited = times.now - self._began
        if len(self.names) == self._nodes or (
            self._standing is not None and times.now - self._standing_at >= self._timing.standing_s
        ):
            return self._begin(times)
        for node, since in self._away.items():
            if times.now - since >= self._timing.rejoin_s:
                return self._lose(node, "left before the start", times)
        if waited >= self._timing.gather_s:
            missing = [node for node in range(self._nodes) if node not in self.names]
            return [a for node in missing for a in self._lose(node, f"not there after {waited:.0f} s", times)]
        return []

    def _begin(self, times: Times) -> list[Action]:
        if self._standing is not None:
            self._try = -1
            return self._step_back(self._standing)
        seconds = round(times.clock - self.claimed, 1)
        names = [self.names[node] for node in sorted(self.names)]
        return [
            Enter("started", {"nodes": names, "seconds": seconds}),
            Say(f"all {self._nodes} nodes are there {seconds:g} s after the claim"),
            *self._start(),
        ]

    def _start(self) -> list[Action]:
        self._try += 1
        self._early.clear()
        port = self._free_port()
        return [
            Say(f"start: rendezvous at {self._address}:{port}, try {self._try}"),
            Tell({"type": "start", "try": self._try, "address": self._address, "port": port}),
        ]

    def _step_back(self, request: StopRequest) -> list[Action]:
        fields = {"node": request.who, "why": request.why, "deadline": request.deadline}
        self._verdict = {"type": "step-back", **fields}
        return [
            Enter("step-back", fields),
            Say(f"step back before the start: {request.why} on {request.who or 'the run'}"),
            Tell(self._verdict),
        ]

    def _bind_failed(self, node: int, message: Message, times: Times) -> list[Action]:
        if message.get("try") != self._try or self._failed is not None:
            return []
        if self._try >= MAX_TRIES:
            return self._fail(node, "peer-lost", f"no free port for the rendezvous in {MAX_TRIES} tries", times)
        return [Say("the rendezvous port was taken; all nodes try another"), *self._start()]

    # stop
    def _notice(self, node: int, message: Message, times: Times) -> list[Action]:
        name, deadline = str(message.get("name", node)), float(message.get("time") or 0.0)
        fields = {"node": name, "action": message.get("action"), "deadline": deadline, "seen": message.get("seen")}
        request = StopRequest(why="notice", who=name, deadline=deadline)
        return [*self._request(request, times), Enter("notice", fields)]

    def _rebalance(self, node: int, message: Message, times: Times) -> list[Action]:
        fields = {"node": str(message.get("name", node)), "notice_time": message.get("time")}
        return [Enter("rebalance", fields), Say(f"{fields['node']} got a rebalance recommendation: going on")]

    def _asked(self, node: int, message: Message, times: Times) -> list[Action]:
        """Take a launch's wish to stop, from a signal that Slurm sent it."""
        request = StopRequest(why=str(message.get("why", "user")), who=str(message.get("name", "")))
        actions = self._request(request, times)
        if request.why == "time-limit" and not self._limit and not self._asked_limit:
            self._asked_limit = True  # the signal says that the end is near, and not when
            actions.append(AskLimit())
        return actions

    def limit(self, end: float, times: Times) -> list[Action]:
        """Take when Slurm ends the job, in seconds since the epoch: what AskLimit asked for."""
        return [*self._request(StopRequest(why="time-limit", who="slurm", deadline=end), times), *self.tick(times)]

    def _request(self, request: StopRequest, times: Times) -> list[Action]:
        if request.why == "time-limit" and request.deadline:
            self._limit = min(self._limit or request.deadline, request.deadline)
        if self._try <= 0:
            if self._standing is None and self._try == 0:
                why = "standing-notice" if request.why == "notice" else request.why
                self._standing = StopRequest(**{**vars(request), "why": why})
                self._standing_at = times.now
            return []
        if self._stop is not None:
            return self._hasten(request)
        self._stop, self._stop_at = request, times.now
        fields = {"why": request.why, "node": request.who, "deadline": request.deadline}
        return [
            Tell({"type": "stop", **fields}),  # first: of two minutes, the rest can wait
            Enter("stop-requested", fields),
            Say(f"stop: {request.why} {request.who}, {_left(request.deadline, times)}"),
        ]

    def _hasten(self, request: StopRequest) -> list[Action]:
        """Move a stop's deadline forward; a later one changes nothing."""
        assert self._stop is not None
        if not request.deadline or 0 < self._stop.deadline <= request.deadline:
            return []
        self._stop = StopRequest(**{**vars(self._stop), "deadline": request.deadline})
        fields = {"why": self._stop.why, "node": self._stop.who, "deadline": request.deadline}
        return [
            Say(f"the stop's deadline is now that of {request.why} {request.who}"),
            Tell({"type": "stop", **fields}),
        ]

    def _ack(self, node: int, message: Message, times: Times) -> list[Action]:
        self._acks.add(node)
        if self._armed or self._stop is None or not self._everyone(self._acks | set(self.ended) | set(self.lost)):
            return []
        self._armed = True
        seconds = round(times.now - self._stop_at, 3)
        return [
            Enter("stop-armed", {"seconds": seconds}),
            Say(f"all nodes have set their flag, {seconds:g} s after the request"),
            Arm(),
        ]

    # loss and end
    def _lose(self, node: int, why: str, times: Times) -> list[Action]:
        self.lost[node] = why
        name = self.names.get(node, f"node {node}")
        return [
            Enter("peer-lost", {"node": name, "why": why}),
            *self._fail(node, "peer-lost", f"{name} is lost: {why}", times),
        ]

    def _ended(self, node: int, message: Message, times: Times) -> list[Action]:
        if message.get("unseen") and self._started_before is None:
            self._unseen[node] = message
            return []
        if message.get("unseen") and self._started_before:  # a new node without its mount, not a wrong path
            message = {**message, "cause": "peer-lost", "code": 1}
        cause, name = str(message.get("cause")), str(message.get("name", node))
        self.names.setdefault(node, name)
        if message.get("stage") == "rendezvous" and self._try > 0 and node not in self._early:
            self._early[node] = (times.now, message)  # perhaps node 0 could not bind: then all begin anew
            return []
        self.ended[node] = cause
        fields = {"node": name, "cause": cause, "code": message.get("code"), "why": message.get("why")}
        actions: list[Action] = [Enter("node-exit", fields)]
        if not message.get("recorded", True):
            code, why = int(message.get("code") or 1), str(message.get("why"))
            actions.append(RecordFor(name, Record(cause, code, why, saved=False)))
        if cause in _FAILURES:
            actions += self._fail(node, cause, f"{cause} on {name}: {message.get('why')}", times)
        return actions

    def _fail(self, node: int, cause: str, why: str, times: Times) -> list[Action]:
        """Tell the gang that it cannot go on. The first cause stands."""
        if self._failed is not None:
            return []
        self._failed, self._failed_at = cause, times.now
        message = {"type": "failed", "node": node, "cause": cause, "why": why}
        if self._try <= 0:
            self._verdict = message
        return [Say(why), Tell(message)]

    def _ripen(self, times: Times) -> list[Action]:
        """Believe in a torchrun's early failure when node 0 has had time to say that it could not bind."""
        actions: list[Action] = []
        for node, (since, message) in list(self._early.items()):
            if times.now - since >= self._timing.rendezvous_s or self._failed is not None:
                del self._early[node]
                actions += self._ended(node, {**message, "stage": "ranks"}, times)
        return actions

    def _overdue(self, times: Times) -> list[Action]:
        """End ranks that hang: in a collective after a loss, in teardown after the commit, or past the deadline."""
        if self._terminated or self._everyone(self._over()):
            return []
        why = self._terminate_why(times)
        if why is None:
            return []
        self._terminated = True
        return [Say(f"ending the ranks that still run: {why}"), Tell({"type": "terminate", "why": why})]

    def _terminate_why(self, times: Times) -> str | None:
        timing = self._timing
        if self._failed is not None:
            grace = timing.save_grace_s if self._page.saving else timing.grace_s
            return "the gang has failed" if times.now - self._failed_at >= grace else None
        if self._stop is None:
            return None
        if self._page_ended_at is not None and times.now - self._page_ended_at >= timing.straggler_s:
            return f"{timing.straggler_s:g} s after the commit"
        if not self._stop.deadline:
            return None
        # of a time limit nothing is left over: Slurm ends the batch script then, and it has still to requeue the job
        if self._limit and times.clock >= self._limit - timing.margin_s - timing.kill_s:
            return "the time limit is near"
        if self._page.ended and times.clock >= self._stop.deadline - timing.margin_s:
            return "committed, and the deadline is near"
        return "the deadline has passed" if times.clock >= self._stop.deadline + timing.overdue_s else None

    def _finish(self, times: Times) -> list[Action]:
        """Release the launches when all have ended and the mirror is done, or has no time left."""
        if not self._everyone(self._over()) or self._early or self._still_writing(times):
            return []
        actions: list[Action] = []
        if self._finishing_at is None:
            self._finishing_at = times.now
            actions.append(FinishMirror(self._mirror_deadline(times)))
        if not self._mirrored and not self._mirror_overdue(times):
            return actions
        self.released = True
        return [*actions, Say("released"), Tell({"type": "release"})]

    def _still_writing(self, times: Times) -> bool:
        """Return whether the writers have yet to finish what the ranks had copied, and have time for it."""
        if not self._page.writing:
            return False
        if self._over_at is None:
            self._over_at = times.now
        # a node that is lost has taken its writer along, so that little can be hoped for
        grace = self._timing.save_grace_s if self.lost else self._timing.write_s
        near = (
            self._stop is not None
            and self._stop.deadline
            and times.clock >= self._stop.deadline - self._timing.margin_s
        )
        return times.now - self._over_at < grace and not near

    def _mirror_deadline(self, times: Times) -> float:
        if self._failed is not None:
            return times.clock + self._failed_mirror_s()
        return self._stop.deadline - self._timing.margin_s if self._stop and self._stop.deadline else 0.0

    def _mirror_overdue(self, times: Times) -> bool:
        assert self._finishing_at is not None
        waited = times.now - self._finishing_at
        if self._failed is not None:
            return waited >= self._failed_mirror_s()
        deadline = self._stop.deadline if self._stop else 0.0
        near = bool(deadline) and times.clock >= deadline - self._timing.margin_s
        return near or waited >= self._timing.mirror_s

    def _failed_mirror_s(self) -> float:
        lost = self._failed != "program-error"
        return self._timing.mirror_lost_s if lost else self._timing.mirror_failed_s

    def _over(self) -> set[int]:
        return set(self.ended) | set(self.lost)

    def _everyone(self, nodes: set[int]) -> bool:
        """Return whether `nodes` holds the whole gang; before the start these are the launches that came."""
        gang: Mapping[int, str] | range = self.names if self._try <= 0 else range(self._nodes)
        return nodes >= set(gang)


def _left(deadline: float, times: Times) -> str:
    return f"{deadline - times.clock:.0f} s left" if deadline else "no deadline known"
