"""A rank's hold on its writer."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctool.checkpoint.frames import BrokenFrameError, Frame, Receiver, send
from pctool.errors import PctoolError

_ANSWER_S = 60.0  # the writer may have to be started, on a busy node from a shared file system
_END_S = 30.0
_DIE_S = 1.0


class WriterLostError(PctoolError):
    """The writer has died, was killed, or cannot be started."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a save ended."""

    name: str
    ok: bool
    why: str = ""
    fenced: bool = False
    told: bool = False  # the coordinator has entered it in the ledger
    bytes: int = 0
    seconds: float = 0.0  # from its begin until it was complete


class WriterClient:
    """One rank's writer: reached at `address` (launch's server), else started by this process.

    Orders are sent from one thread; verdicts come in another. Where the writer dies, `alive` turns False, what was in
    flight has failed, and `connect` makes a new one.
    """

    def __init__(
        self, address: str | None, *, say: Callable[[str], None], on_commit: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._say = say
        self._on_commit = on_commit
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._verdict = threading.Condition()
        self._results: dict[str, Result] = {}
        self._in_flight: str | None = None
        self.written = ""  # the save whose files of this rank are durable
        self.alive = False
        self.joined = False

    def connect(self) -> None:
        """Start the writer, or reach launch's. Raise WriterLostError."""
        self.close(wait=False)
        try:
            sock = self._reach() if self._address else self._start()
        except OSError as error:
            raise WriterLostError(f"the checkpoint writer cannot be started: {error}") from error
        self._sock, self.alive, self.joined = sock, True, False
        self._answers = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, args=(sock, self._answers), name="writer", daemon=True)
        self._listener.start()

    def coordinate(self, **fields: Any) -> tuple[str, int]:
        """Have this writer coordinate the gang's; return its address."""
        self._send({"op": "coordinate", **fields})
        host, port = self._answer("coordinating").fields["address"]
        return str(host), int(port)

    def join(self, host: str, port: int, *, rank: int, token: str) -> None:
        """Have this writer report to the coordinator there."""
        self._send({"op": "join", "host": host, "port": port, "rank": rank, "token": token})
        self._answer("joined")
        self.joined = True

    def share(self, fd: int, size: int) -> None:
        """Give the writer the memory that it is to write from."""
        self._send({"op": "buffer", "bytes": size}, fds=(fd,))

    def save(
        self,
        name: str,
        folder: Path,
        *,
        file: str,
        size: int,
        small: Mapping[str, bytes],
        order: Mapping[str, Any] | None,
        need: tuple[int, int] | None = None,
    ) -> None:
        """Order that the first `size` bytes of the shared memory become `file`, and that `small` files are written.

        `need` are the bytes and the files of the whole checkpoint, which rank 0's writer looks for room for. The memory
        belongs to the writer until `wait` has returned.
        """
        fields = {"op": "save", "name": name, "folder": str(folder), "file": file, "size": size, "small": list(small)}
        fields |= ({"order": order} if order else {}) | ({"need": need} if need else {})
        self._order(name, fields, list(small.values()))

    def abort(self, name: str, why: str, *, order: Mapping[str, Any] | None) -> None:
        """Say that this rank could not copy its state, so that nobody waits for it."""
        self._order(name, {"op": "abort", "name": name, "why": why, **({"order": order} if order else {})})

    @property
    def in_flight(self) -> str | None:
        """Return the name of the save that is not over, None if there is none."""
        return self._in_flight

    def wait(self, timeout: float | None = None) -> Result | None:
        """Wait for the save in flight and return how it ended; None if there is none, or if the time is over."""
        name = self._in_flight
        if name is None:
            return None
        with self._verdict:
            if not self._verdict.wait_for(lambda: name in self._results, timeout):
                return None
            self._in_flight = None
            return self._results.pop(name)

    def close(self, *, wait: bool = True) -> None:
        """Let the writer go: it ends once what was ordered is written. Wait for one of our own, if asked to."""
        sock, self._sock = self._sock, None
        self.alive = self.joined = False
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR if wait else socket.SHUT_RDWR)
            if wait and self._listener is not None:
                self._listener.join(_END_S)  # what the writer says until its end is heard, and closes the socket
        process, self._process = self._process, None
        if process is not None and wait:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        if process is not None and process.poll() is None:
            process.returncode = 0  # it ends by itself, and is nobody's to wait for: not a leak to be warned of

    def _abandon(self) -> None:
        """Do without a writer that hangs; one of our own must not go on once it can, beside the one that follows."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that waits for a file system may not even die
                self._process.wait(_DIE_S)
        self.close(wait=False)

    def _order(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        with self._verdict:
            self._results.pop(name, None)
            self._in_flight = name
        try:
            self._send(fields, blobs)
        except WriterLostError as error:
            self._fail(error.what)

    def _reach(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(f"\0{self._address}")
        except OSError:
            sock.close()
            raise
        sock.settimeout(None)
        return sock

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pctool.checkpoint.writer", "--fd", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # what it says comes through the socket; it must hold no pipe of ours
                    start_new_session=True,
                    env=_environment(),
                )
            except OSError:
                ours.close()
                raise
        return ours

    def _send(self, fields: dict[str, Any], blobs: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
        if self._sock is None:
            raise WriterLostError("there is no checkpoint writer")
        try:
            send(self._sock, fields, blobs, fds)
        except OSError as error:
            raise WriterLostError(f"the checkpoint writer has gone: {error}") from error

    def _answer(self, op: str) -> Frame:
        end = time.monotonic() + _ANSWER_S
        try:
            frame = self._answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            self._abandon()  # else its late answer would pass for that to the next question
            raise WriterLostError(f"the checkpoint writer did not answer in {_ANSWER_S:g} s") from None
        if frame is None or frame.op != op:
            why = "has gone" if frame is None else str(frame.fields.get("why"))
            raise WriterLostError(f"the checkpoint writer: {why}")
        return frame

    def _listen(self, sock: socket.socket, answers: queue.SimpleQueue[Frame | None]) -> None:
        receiver = Receiver(sock)
        with sock:
            try:
                while (frame := receiver.next()) is not None:
                    self._hear(frame, answers)
            except (OSError, BrokenFrameError):
                pass  # the same as its end
        answers.put(None)
        if sock is self._sock:
            self.alive = self.joined = False
        self._fail("the checkpoint writer has gone")

    def _hear(self, frame: Frame, answers: queue.SimpleQueue[Frame | None]) -> None:
        fields = frame.fields
        if frame.op == "say":
            self._say(str(fields["text"]))
        elif frame.op in {"committed", "failed"}:
            self._settle(
                Result(
                    name=str(fields["name"]),
                    ok=frame.op == "committed",
                    why=str(fields.get("why", "")),
                    fenced=bool(fields.get("fenced")),
                    told=True,
                    bytes=int(fields.get("bytes", 0)),
                    seconds=float(fields.get("seconds", 0.0)),
                )
            )
            if frame.op == "committed":
                self._on_commit()
        elif frame.op == "cut":
            self.joined = False
            self._fail(str(fields["why"]))
        elif frame.op == "refused" and self._in_flight is not None and self.joined:
            self._fail(str(fields["why"]))
        elif frame.op == "durable":
            self.written = str(fields["name"])
        else:
            answers.put(frame)

    def _fail(self, why: str) -> None:
        if self._in_flight is not None:
            self._settle(Result(name=self._in_flight, ok=False, why=why))

    def _settle(self, result: Result) -> None:
        with self._verdict:
            if result.name == self._in_flight:
                self._results.setdefault(result.name, result)  # the first counts: a cut behind a verdict says nothing
                self._verdict.notify_all()


def _environment() -> dict[str, str]:
    """Return the writer's environment: it must find the same pctool, and needs no device."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([path] if path else [])])}
