"""`pctool launch`: one a node. Joins the gang, runs torchrun, watches, and ends with the others.

This module only wires: threads put events into one inbox, the main thread hands them to the state machines (Member on
every node, Gang on node 0) and has done what they ask for. Nothing here decides.
"""

from __future__ import annotations

import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pctool.aws.imds import Imds, ImdsError, Notice
from pctool.errors import SlurmError, UsageError
from pctool.node import actions as do
from pctool.node.actions import Action
from pctool.node.config import LaunchConfig
from pctool.node.gang import Gang, PageView, Times
from pctool.node.hands import Hands
from pctool.node.hub import Gone, Hub, HubEvent, Joined, Said, listen
from pctool.node.member import Member, RanksEnd
from pctool.node.mirror import Mirror
from pctool.node.peer import HubGone, HubSaid, Peer, PeerEvent
from pctool.node.refusal import Refusal, check_node, has_started
from pctool.node.scribe import Scribe
from pctool.node.trouble import NodeTroubleError
from pctool.node.watch import Looker, Watcher
from pctool.node.writers import Writers
from pctool.run.page import Outcome
from pctool.run.records import Claim
from pctool.run.stop import StopRequest

TICK_S = 0.2  # page and timers; memory only. A commit is seen, and a grace ends, at most so late
_FLUSH_S = 20.0  # for ledger and log on the shared file system; Slurm's KillWait is 30 s
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[Any], None]


class Launch:
    """One launch. `emit` prints a line for people; `free_port` chooses ports for the rendezvous on node 0."""

    def __init__(
        self, config: LaunchConfig, *, emit: Callable[[str], None], free_port: Callable[[], int] | None = None
    ) -> None:
        self._config = config
        self._emit = emit
        self._inbox: queue.SimpleQueue[tuple[Handler, Any]] = queue.SimpleQueue()  # its put is safe in signal handlers
        self._member = Member(name=config.name, stop_signal=config.stop_signal is not None, timing=config.timing)
        self._gang: Gang | None = None
        if config.node == 0:
            self._gang = Gang(
                nodes=config.nodes,
                address=config.hub_host,
                free_port=free_port or (lambda: _free_port(config.hub_host)),
                timing=config.timing,
                times=_times(),
            )
        self._hub: Hub | None = None
        self._peer: Peer | None = None
        self._mirror: Mirror | None = None
        self._finishing = False
        self._checked = self._looked = False
        self._committed = -1
        self._next_tick = 0.0
        self._code: int | None = None
        self._scribe = Scribe(
            config,
            heartbeat=self._heartbeat,
            on_stop=lambda request: self._put(self._on_stop_file, request),
            complain=emit,
        )
        self._writers = Writers(config, say=lambda text: self._put(self._hands.say, text))
        self._hands = Hands(
            config,
            scribe=self._scribe,
            writers=self._writers.address,
            emit=emit,
            on_ranks_end=lambda end: self._put(self._on_ranks_end, end),
        )
        self._watcher = Watcher(
            Looker(node=config.name, imds=Imds(config.imds), notice_file=config.notice_file),
            on_notice=lambda notice: self._put(self._on_notice, notice),
            on_rebalance=lambda when: self._put(self._on_rebalance, when),
            on_first=self._first_look,
            log=lambda text: self._put(self._hands.say, text),
            poll_s=config.poll_s,
        )

    def run(self) -> int:
        """Run until the gang has ended, and return the exit code.

        Raise UsageError if the hub cannot listen there, NodeTroubleError if it can only not now.
        """
        before_hook, threading.excepthook = threading.excepthook, lambda args: self._put(self._crash, args.exc_value)
        before = {signum: signal.signal(signum, self._on_os_signal) for signum in _SIGNALS}
        try:
            self._scribe.start()
            self._writers.start()
            self._open_channel()
            self._watcher.start()
            threading.Thread(target=self._check, name="checks", daemon=True).start()
            while self._code is None:
                self._turn()
            return self._code
        except (UsageError, NodeTroubleError) as error:
            cause = "peer-lost" if isinstance(error, NodeTroubleError) else "program-error"
            self._hands.record(self._config.name, do.Record(cause, error.exit_code, error.what, saved=False))
            raise
        finally:
            self._close()
            threading.excepthook = before_hook
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _put(self, handler: Handler, payload: Any) -> None:
        self._inbox.put((handler, payload))

    def _turn(self) -> None:
        """Handle one event, or what time brings."""
        try:
            handler, payload = self._inbox.get(timeout=max(0.0, self._next_tick - time.monotonic()))
        except queue.Empty:
            self._tick()
            return
        handler(payload)
        if time.monotonic() >= self._next_tick:
            self._tick()

    def _open_channel(self) -> None:
        config = self._config
        if config.node != 0:
            self._peer = Peer(
                config.hub_host,
                config.hub_port,
                nonce=config.nonce,
                node=config.node,
                deliver=lambda event: self._put(self._on_peer_event, event),
                join_s=config.timing.gather_s,
            )
            self._peer.start()
        elif config.nodes > 1:
            _allow_files(config.nodes)
            self._hub = Hub(
                listen(config.hub_host, config.hub_port),
                nonce=config.nonce,
                nodes=config.nodes,
                deliver=lambda event: self._put(self._on_hub_event, event),
            )
            self._hub.start()

    def _close(self) -> None:
        """End all that was begun. What was sent and written before goes out first."""
        self._watcher.stop()
        self._hands.close()
        self._writers.close()
        if self._mirror is not None:
            self._mirror.stop()
        for channel in (self._hub, self._peer):
            if channel is not None:
                channel.close()
        self._scribe.close(seconds=_FLUSH_S)

    # before the start, in threads
    def _check(self) -> None:
        """Check what this node needs: a shared file system may be slow."""
        if self._gang is not None:
            self._put(self._on_history, has_started(self._config, job_only=False))
        result = check_node(self._config, lambda: self._hands.write_start(None))
        self._put(self._on_refused if isinstance(result, Refusal) else self._on_checked, result)

    def _first_look(self) -> None:
        """Come after the watcher's first look, in its thread: a standing notice has been told by now."""
        with suppress(ImdsError):
            self._hands.instance = Imds(self._config.imds, total=2.0).instance_id()
        self._put(self._on_first_look, None)

    # events, in the main thread
    def _on_first_look(self, _: None) -> None:
        self._looked = True
        self._maybe_ready()

    def _on_checked(self, claim: Claim) -> None:
        self._checked = True
        if self._gang is not None:
            self._gang.claimed = claim.time
        if self._gang is not None and self._config.store is not None:
            self._mirror = Mirror(self._config, on_end=lambda code: self._put(self._on_mirror_end, code))
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._checked and self._looked:
            self._do(self._member.ready())

    def _on_history(self, started: bool) -> None:
        assert self._gang is not None
        self._do_gang(self._gang.history(started, _times()))

    def _on_refused(self, refusal: Refusal) -> None:
        error = refusal.error
        self._emit(str(error))
        code = error.exit_code if refusal.cause == "program-error" else 1
        record = do.Record(refusal.cause, code, error.what, saved=False)
        self._do(self._member.refuse(record, time.monotonic(), recorded=refusal.recorded, unseen=refusal.unseen))

    def _on_notice(self, notice: Notice) -> None:
        self._do(self._member.notice(notice, time.time()))

    def _on_rebalance(self, when: float) -> None:
        self._do(self._member.rebalance(when))

    def _on_os_signal(self, signum: int, _frame: object) -> None:
        self._put(self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        self._do(self._member.signalled(signum, time.monotonic()))

    def _crash(self, error: BaseException) -> None:
        raise RuntimeError("a thread of launch died") from error

    def _on_peer_event(self, event: PeerEvent) -> None:
        if isinstance(event, HubSaid):
            self._do(self._member.said(event.message, time.monotonic()))
        elif isinstance(event, HubGone):
            self._do(self._member.hub_gone(event.why, time.monotonic()))

    def _on_hub_event(self, event: HubEvent) -> None:
        assert self._gang is not None
        if isinstance(event, Said):
            self._do_gang(self._gang.said(event.node, event.message, _times()))
        elif isinstance(event, Gone):
            self._do_gang(self._gang.gone(event.node, event.why, _times()))
        elif isinstance(event, Joined):
            self._gang.joined(event.node)

    def _on_stop_file(self, request: StopRequest) -> None:
        assert self._gang is not None
        self._do_gang(self._gang.stop_file(request, _times()))

    def _ask_limit(self) -> None:
        """Ask Slurm when the job ends, in a thread of its own: slurmctld may take its time."""
        from pctool.slurm import query  # only here: few launches need it

        if not self._config.job:
            return
        try:
            job = query.patiently(lambda: query.show_job(self._config.job))
        except SlurmError as error:
            self._put(self._hands.say, f"no deadline is known: {error.what}")
            return
        if job is not None and job.end_time:
            self._put(self._on_limit, job.end_time)

    def _on_limit(self, end: float) -> None:
        assert self._gang is not None
        self._do_gang(self._gang.limit(end, _times()))

    def _on_ranks_end(self, end: RanksEnd) -> None:
        self._look_at_page()
        self._do(self._member.ranks_ended(replace(end, outcome=self._hands.page.outcome), time.monotonic()))

    def _on_mirror_end(self, code: int) -> None:
        assert self._gang is not None
        if code != 0:
            self._hands.say(f"the mirror ended with {code}: see mirror.log and the ledger")
        if self._finishing:
            self._do_gang(self._gang.mirror_finished(_times()))

    def _tick(self) -> None:
        now = time.monotonic()
        self._next_tick = now + TICK_S
        self._hands.tick(now)
        self._do(self._member.tick(now))
        self._look_at_page()

    def _look_at_page(self) -> None:
        """Pass on what node 0's ranks say."""
        if self._gang is None:
            return
        page = self._hands.page
        if page.committed != self._committed:
            self._committed = page.committed
            self._hands.say(f"step {self._committed} is committed")
            if self._mirror is not None:
                self._mirror.committed()
        ended = page.outcome in {Outcome.STOPPED, Outcome.STOPPED_UNSAVED}
        view = PageView(saving=page.saving_since > 0, writing=page.writing_since > 0, ended=ended)
        self._do_gang(self._gang.page(view, _times()))

    # actions
    def _do(self, actions: list[Action]) -> None:
        """Do what this node's state machine asks for; its messages go to the hub."""
        for action in actions:
            if isinstance(action, do.Tell) and self._peer is not None:
                self._peer.send(action.message)
            elif isinstance(action, do.Tell):
                # not at once: the gang's answer must come after what is still to be done here
                self._put(self._from_node_0, action.message)
            else:
                self._act(action)

    def _from_node_0(self, message: dict[str, Any]) -> None:
        assert self._gang is not None
        self._do_gang(self._gang.said(0, message, _times()))

    def _do_gang(self, actions: list[Action]) -> None:
        """Do what the gang's state machine asks for; its messages go to all launches, this one included."""
        for action in actions:
            if isinstance(action, do.Tell):
                if self._hub is not None:
                    self._hub.broadcast(action.message)
                self._put(self._from_hub, action.message)
            else:
                self._act(action)

    def _from_hub(self, message: dict[str, Any]) -> None:
        self._do(self._member.said(message, time.monotonic()))

    def _act(self, action: Action) -> None:
        hands: dict[type, Handler] = {
            do.Say: lambda say: self._hands.say(say.text),
            do.Enter: lambda enter: self._scribe.enter(enter.event, enter.fields),
            do.Arm: lambda _: self._hands.page.allow_publish(),
            do.AskLimit: lambda _: threading.Thread(target=self._ask_limit, name="limit", daemon=True).start(),
            do.FinishMirror: lambda finish: self._finish_mirror(finish.deadline),
            do.StartRanks: self._start_ranks,
            do.RequestStop: self._hands.request_stop,
            do.EndRanks: lambda _: self._hands.end_ranks(),
            do.Record: lambda record: self._hands.record(self._config.name, record),
            do.RecordFor: lambda other: self._hands.record(other.node, other.record),
            do.Exit: self._exit,
        }
        hands[type(action)](action)

    def _start_ranks(self, action: do.StartRanks) -> None:
        self._hands.start_ranks(action)
        if self._mirror is not None:
            self._mirror.start()  # it begins with what earlier attempts left

    def _exit(self, action: do.Exit) -> None:
        self._code = action.code

    def _finish_mirror(self, deadline: float) -> None:
        self._finishing = True
        if self._mirror is not None and self._mirror.started:
            self._mirror.finish(deadline)
        else:
            self._put(self._on_mirror_end, 0)

    def _heartbeat(self) -> dict[str, Any]:
        """Return the heartbeat's content (called in the scribe's thread; reads memory only)."""
        page, gang = self._hands.page, self._gang
        there = len(gang.names) - len(gang.lost) if gang is not None else 0
        return {
            "time": round(time.time(), 3),
            "step": page.step,
            "step_time": page.step_time,
            "committed": page.committed,
            "saving_since": page.saving_since or page.writing_since,
            "nodes": there,
        }


def _times() -> Times:
    return Times(time.monotonic(), time.time())


def _free_port(host: str) -> int:
    """Return a port that is free now; should another take it first, all try again with the next."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _allow_files(nodes: int) -> None:
    """Raise the soft limit of open files where a large gang needs it: one connection a node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * nodes + 256
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard))
