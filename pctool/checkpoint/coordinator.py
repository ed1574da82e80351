"""Who makes a checkpoint of what all writers of a gang have written: rank 0's writer, in a thread of its own.

Every writer, rank 0's too, holds one connection to it. It says `written` (with the files' entries) or `failed` of a
checkpoint, and `gone` once its rank has gone. When all have answered and all have written, the fence is checked,
MANIFEST written, and `committed` said to all; else what was written is removed, and `failed` said to all. A connection
that ends is an answer too. So a checkpoint becomes complete if and only if all ranks had copied that step.
"""

from __future__ import annotations

import hmac
import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.frames import LINE_MAX, BrokenFrameError, Frame, Receiver, send
from pctool.checkpoint.lineage import clear_unfinished, parents_of, prune, rejected
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.stores import PosixStore, StoreUnreadableError
from pctool.errors import FencedError, IncompleteError, PctoolError
from pctool.run.layout import RunDir, checkpoint_name, fsync_dir
from pctool.run.ledger import Ledger
from pctool.run.page import Page

_HELLO_S = 10.0  # a connection that has not said who it is by then is none of ours
_HELLO_BYTES = 4096  # nor is one that says more than that
_SEND_S = 30.0
STALE_S = 65.0  # NFS shows another node's new names at most acdirmax late, 60 s by default


@dataclass(frozen=True, kw_only=True)
class Order:
    """What rank 0 asks for: one checkpoint, and what its manifest is to say besides the files."""

    name: str
    step: int
    began: float  # seconds since the epoch
    fields: Mapping[str, Any]  # parent, world_size, topology, position, code, config
    stall_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class _Pending:
    """What has been answered of one checkpoint."""

    order: Order | None = None
    files: dict[str, mf.FileEntry] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass
class _Peer:
    sock: socket.socket
    receiver: Receiver
    since: float
    rank: int | None = None


class Coordinator:
    """Serve the writers of one attempt. `say` prints a line for people; it may be called in this thread."""

    def __init__(
        self,
        *,
        run: RunDir,
        attempt: int,
        world: int,
        server: socket.socket,
        token: str,
        keep: Retention,
        page: Page | None,
        say: Callable[[str], None],
    ) -> None:
        """Serve those who connect to `server`, a listening socket."""
        self.run, self.attempt, self.world, self.keep = run, attempt, world, keep
        self._token, self._page, self._say = token, page, say
        self._ledger = Ledger(run.ledger)
        self._server = server
        self.port = int(server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}  # by file descriptor
        self._ranks: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.Lock()
        self._orders: list[Order] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)
        self._thread.start()

    def expect(self, order: Order) -> None:
        """Take rank 0's order; the answers may have come before it."""
        if self._page is not None:
            self._page.report_writing(order.began)
        with self._lock:
            self._orders.append(order)
        self._poke()

    def close(self, seconds: float | None) -> bool:
        """End once nothing is pending; return whether that came within `seconds` (None: however long it takes)."""
        self._closing = True
        self._poke()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._wake.close()
        return True

    def _poke(self) -> None:
        with suppress(OSError):  # it has ended, and with it all that anybody waits for
            self._wake.send(b"!")

    def _serve(self) -> None:
        try:
            while not (self._closing and not self._pending and not self._orders):
                for key, _ in self._selector.select(1.0 if self._unknown() else None):
                    self._turn(key.fileobj)
                self._drop_strangers()
        finally:
            for peer in list(self._peers.values()):
                peer.sock.close()
            for mine in (self._server, self._woken, self._selector):
                mine.close()

    def _turn(self, source: Any) -> None:
        if source is self._server:
            self._accept()
        elif source is self._woken:
            self._woken.recv(4096)
            self._take_orders()
        elif source.fileno() in self._peers:
            self._hear(self._peers[source.fileno()])

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._server.accept()
            sock.settimeout(_SEND_S)
            keep_alive(sock)
            self._peers[sock.fileno()] = _Peer(sock, Receiver(sock, most=_HELLO_BYTES), time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ)

    def _unknown(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.rank is None]

    def _drop_strangers(self) -> None:
        for peer in self._unknown():
            if time.monotonic() - peer.since > _HELLO_S:
                self._drop(peer)

    def _take_orders(self) -> None:
        with self._lock:
            orders, self._orders = self._orders, []
        for order in orders:
            self._pending.setdefault(order.name, _Pending()).order = order
            self._settle(order.name)

    def _hear(self, peer: _Peer) -> None:
        try:
            open_ = peer.receiver.fill()
            while (frame := peer.receiver.take()) is not None:
                self._take(peer, frame)
        except (BrokenFrameError, KeyError, ValueError, TypeError, OSError) as error:
            if peer.rank is not None:
                self._say(f"the writer of rank {peer.rank} is cut off: {error}")
            open_ = False
        if not open_:
            self._drop(peer)

    def _take(self, peer: _Peer, frame: Frame) -> None:
        if peer.rank is None:
            self._greet(peer, frame)
            return
        name = str(frame.fields.get("name", ""))
        if frame.op == "written":
            self._take_written(peer.rank, name, frame.fields["files"])
        elif frame.op == "failed":
            self._pending.setdefault(name, _Pending()).failed[peer.rank] = str(frame.fields.get("why"))
        elif frame.op == "gone":
            self._lose(peer.rank)
            return
        self._settle(name)

    def _take_written(self, rank: int, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        pending = self._pending.setdefault(name, _Pending())
        try:
            pending.files |= {mf.plain_name(file): mf.FileEntry(**entry) for file, entry in files.items()}
            pending.written.add(rank)
        except ValueError as error:
            pending.failed[rank] = str(error)

    def _greet(self, peer: _Peer, frame: Frame) -> None:
        rank = frame.fields["rank"]
        if frame.op != "hello" or not hmac.compare_digest(str(frame.fields.get("token")), self._token):
            raise BrokenFrameError("not one of this run's writers")
        if not isinstance(rank, int) or not 0 <= rank < self.world:
            raise BrokenFrameError(f"rank {rank} of {self.world}")
        peer.rank, peer.receiver.most = rank, LINE_MAX
        self._ranks[rank] = peer
        self._gone.discard(rank)
        self._tell(peer, {"op": "welcome"})

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        self._peers.pop(peer.sock.fileno(), None)
        peer.sock.close()
        if peer.rank is not None and self._ranks.get(peer.rank) is peer:
            del self._ranks[peer.rank]
            self._lose(peer.rank)

    def _lose(self, rank: int) -> None:
        self._gone.add(rank)
        for name in list(self._pending):
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Commit a checkpoint, or give it up, once everybody has answered."""
        pending = self._pending.get(name)
        if pending is None:
            return
        answered = pending.written | pending.failed.keys() | self._gone
        if len(answered) < self.world or (pending.order is None and 0 not in self._gone):
            return
        del self._pending[name]
        missing = sorted(self._gone - pending.written - pending.failed.keys())
        why = _why_not(pending.failed, missing)
        if why or pending.order is None:
            self._give_up(name, pending.order, why or "rank 0 has gone")
        else:
            self._commit(pending.order, pending.files)
        if self._page is not None and not self._pending:
            self._page.report_writing(0.0)

    def _commit(self, order: Order, files: Mapping[str, mf.FileEntry]) -> None:
        try:
            manifest = publish(self.run, self.attempt, order, files)
        except FencedError as error:
            self._give_up(order.name, order, str(error), fenced=True)
            return
        except (PctoolError, OSError) as error:
            self._give_up(order.name, order, str(error))
            return
        if self._page is not None:
            self._page.report_committed(order.step)
        seconds = round(time.time() - order.began, 3)
        self._enter(
            "committed",
            name=order.name,
            step=order.step,
            bytes=manifest.bytes,
            seconds=seconds,
            stall_s=round(order.stall_s, 4),
            waited_s=round(order.waited_s, 3),
            tier="posix",
            parent=order.fields.get("parent"),
            **self.keep.fields(),
        )
        self._say(f"step {order.step} saved as {order.name}")
        self._broadcast({"op": "committed", "name": order.name, "bytes": manifest.bytes, "seconds": seconds})
        self._prune()

    def _give_up(self, name: str, order: Order | None, why: str, *, fenced: bool = False) -> None:
        """Remove what was written, so that one for want of room does not take the room of the next; tell all.

        Everybody has answered, so nobody writes there any more.
        """
        step = order.step if order is not None else None
        if not fenced:
            self._clear(name)  # first, since on a full disk it makes the room that the ledger needs
        self._enter("commit-failed", name=name, step=step, error=why)
        self._say(f"step {step} could not be saved: {why}")
        self._broadcast({"op": "failed", "name": name, "why": why, "fenced": fenced})

    def _clear(self, name: str) -> None:
        store = PosixStore(self.run.checkpoints)
        try:
            if store.manifest(name) is None:
                store.remove(name)
        except (OSError, StoreUnreadableError) as error:
            self._say(f"what was written of {name} could not be removed: {error}")

    def _prune(self) -> None:
        if not self.keep.removes:
            return
        store = PosixStore(self.run.checkpoints)
        try:
            events = self._ledger.read()
            removals = prune(
                self.run, store, self.attempt, self.keep, damaged=rejected(events), parents=parents_of(events)
            )
            for name in itertools.chain(removals, clear_unfinished(self.run, store, self.attempt, events)):
                self._enter("pruned", name=name, tier="posix")
        except (OSError, FencedError, StoreUnreadableError) as error:
            self._say(f"old checkpoints could not be removed: {error}")  # they are in nobody's way yet

    def _enter(self, event: str, **fields: Any) -> None:
        """Enter an event; a full disk must not make a complete checkpoint pass for one that failed."""
        try:
            self._ledger.append(event, attempt=self.attempt, **fields)
        except OSError as error:
            self._say(f"{self._ledger.path} cannot be written ({error.strerror}): {event} {fields}")

    def _broadcast(self, fields: dict[str, Any]) -> None:
        for peer in list(self._ranks.values()):
            self._tell(peer, fields)

    def _tell(self, peer: _Peer, fields: dict[str, Any]) -> None:
        with suppress(OSError):  # its end comes as an event of its own
            send(peer.sock, fields)


def publish(run: RunDir, attempt: int, order: Order, files: Mapping[str, mf.FileEntry]) -> mf.Manifest:
    """Make a checkpoint of written files: see that all are here, check the fence, write MANIFEST, return it.

    Sizes and checksums are the writers' word: each had fsynced what it tells, and nobody else writes files of these
    names. That they are in this very folder is looked up, by name: a node whose shared file system is not mounted
    writes, and fsyncs, on its own disk. Raises FencedError if a newer attempt exists, IncompleteError if a file is not
    there, OSError; then no manifest is left.
    """
    check_fence(run, attempt)
    manifest = mf.Manifest(
        run=str(run.path.absolute()),
        attempt=attempt,
        step=order.step,
        files=files,
        time=round(time.time(), 3),
        **order.fields,
    )
    folder = run.checkpoints / checkpoint_name(attempt, order.step)
    data = mf.encode(manifest)
    there = names_there(folder, files)
    verdict = mf.judge(data, {name: files[name].size for name in there & files.keys()}, name=folder.name)
    if not verdict.ok:
        raise IncompleteError(verdict.why, where=str(folder))
    if mf.NAME not in there:
        for name in there - files.keys():  # a save of this name that died left it; all writers have answered by now
            with suppress(OSError):  # in nobody's way
                (folder / name).unlink()
    for made in (folder, run.checkpoints, run.path):  # the ranks' names, once for all, before a manifest counts on them
        fsync_dir(made)
    check_fence(run, attempt)  # looking may have taken a minute
    PosixStore(run.checkpoints).publish(folder.name, data)
    return manifest


def names_there(folder: Path, names: Collection[str]) -> set[str]:
    """Return the names in a folder; where one of those given seems to be missing, only after STALE_S seconds.

    The client of NFS may show a folder as it was a while ago. A change of its own has it ask the server anew.
    """
    end, pause = time.monotonic() + STALE_S, 0.05
    while True:
        there = set(os.listdir(folder))
        if there.issuperset(names) or time.monotonic() >= end:
            return there
        time.sleep(pause)  # nothing tells when another node's names arrive
        pause = min(2 * pause, 2.0)
        probe = folder / f".look.{os.getpid()}"
        probe.touch()
        probe.unlink()


def _why_not(failed: Mapping[int, str], missing: list[int]) -> str:
    told = [f"rank {rank}: {why}" for rank, why in sorted(failed.items())]
    if missing:
        shown = ", ".join(str(rank) for rank in missing[:8]) + (" ..." if len(missing) > 8 else "")
        told.append(f"rank {shown} has gone without having written it")
    return "; ".join(told)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other node is dead."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
