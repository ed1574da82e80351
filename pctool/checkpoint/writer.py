"""The writer: writes what a rank has copied, while the rank trains on: `python -m pctool.checkpoint.writer`.

A process in a session of its own, one a rank. It survives its rank's death, and then still writes what the rank had
copied; the host memory that it writes from is a memfd that the rank sent it, so nothing named outlives a kill. Without
`pctool launch` each rank starts its own (`--fd`); under launch they are forks of one server a node (`--listen`), a
child of launch. Rank 0's writer also holds the coordinator. This process imports no torch.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pctool.checkpoint.coordinator import Coordinator, Order, keep_alive
from pctool.checkpoint.frames import BrokenFrameError, Frame, Receiver, send
from pctool.checkpoint.manifest import FileEntry
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.space import RoomCheck
from pctool.checkpoint.writing import write_bytes, write_region
from pctool.errors import IncompleteError, PctoolError
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.page import Page

_CONNECT_S = 30.0
_BACKLOG = 4096  # all writers of a gang come at once
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Writer:
    """One rank's writer. `sock` leads to the rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()  # the relay of verdicts sends from its own thread
        self._memory: mmap.mmap | None = None
        self._coordinator: Coordinator | None = None
        self._link: socket.socket | None = None
        self._room: RoomCheck | None = None
        self._doubted = ""

    def serve(self) -> None:
        """Follow the rank's orders until it has gone; return when nothing is left to do."""
        receiver = Receiver(self._sock)
        try:
            while (frame := receiver.next()) is not None:
                self._follow(frame)
        except BrokenFrameError as error:
            self._complain(f"the rank sent what is no order: {error}")
        self._report({"op": "gone"})
        if self._coordinator is not None:
            self._coordinator.close(None)

    def _follow(self, frame: Frame) -> None:
        fields = frame.fields
        try:
            if frame.op == "coordinate":
                self._coordinate(fields)
            elif frame.op == "join":
                self._join(fields)
            elif frame.op == "buffer":
                self._map(frame)
            elif frame.op == "save":
                self._save(fields, frame.blobs)
            elif frame.op == "abort":
                self._expect(fields)
                self._report({"op": "failed", "name": fields["name"], "why": fields["why"]})
        except OSError as error:
            self._tell({"op": "refused", "why": f"{frame.op}: {error}"})

    def _coordinate(self, fields: dict[str, Any]) -> None:
        if self._coordinator is not None:
            self._coordinator.close(0.0)
        self._coordinator = Coordinator(
            run=RunDir(Path(fields["run"])),
            attempt=fields["attempt"],
            world=fields["world"],
            server=_listen(fields["host"]),
            token=fields["token"],
            keep=Retention.from_fields(fields["keep"]),
            page=Page.open(fields["page"]) if fields["page"] else None,
            say=self._complain,
        )
        self._tell({"op": "coordinating", "address": [fields["host"], self._coordinator.port]})

    def _join(self, fields: dict[str, Any]) -> None:
        """Connect to the coordinator, and pass on what it says."""
        self._cut()
        link = socket.create_connection((fields["host"], fields["port"]), timeout=_CONNECT_S)
        keep_alive(link)
        send(link, {"op": "hello", "rank": fields["rank"], "token": fields["token"]})
        receiver = Receiver(link)
        welcome = receiver.next()
        if welcome is None or welcome.op != "welcome":
            raise ConnectionError("the coordinator did not answer")
        link.settimeout(None)
        self._link = link
        threading.Thread(target=self._relay, args=(link, receiver), name="verdicts", daemon=True).start()
        self._tell({"op": "joined"})

    def _relay(self, link: socket.socket, receiver: Receiver) -> None:
        try:
            while (frame := receiver.next()) is not None:
                self._tell(frame.fields)
        except (OSError, BrokenFrameError):
            pass  # the same as its end
        if link is self._link:
            self._link = None  # what is sent there from now on would be lost without a word
            link.close()
            self._tell({"op": "cut", "why": "the writer of rank 0 has gone"})

    def _cut(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _map(self, frame: Frame) -> None:
        if self._memory is not None:
            self._memory.close()
        fd = frame.fds[0]
        self._memory = mmap.mmap(fd, frame.fields["bytes"], prot=mmap.PROT_READ)
        os.close(fd)

    def _save(self, fields: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Write one checkpoint's files of this rank, and say how it went: to the coordinator, then to the rank."""
        began = time.monotonic()
        name = fields["name"]
        self._expect(fields)
        try:
            self._check_room(fields)
            files = self._write(Path(fields["folder"]), fields, blobs)
        except (OSError, PctoolError) as error:
            self._report({"op": "failed", "name": name, "why": str(error)})
            return
        entries = {file: asdict(entry) for file, entry in files.items()}
        self._tell({"op": "durable", "name": name, "seconds": time.monotonic() - began})
        self._report({"op": "written", "name": name, "files": entries})

    def _check_room(self, fields: dict[str, Any]) -> None:
        """Raise IncompleteError if the whole checkpoint cannot fit; rank 0's writer asks for all."""
        if "need" not in fields or os.environ.get(env.ROOM) == "ignore":
            return
        if self._room is None:
            self._room = RoomCheck(Path(fields["folder"]).parent)
        room = self._room.check(*fields["need"])
        if not room.fits:
            raise IncompleteError(room.what, where=room.where, fix=room.fix)
        if room.doubtful and room.what != self._doubted:
            self._doubted = room.what
            self._complain(str(room))

    def _expect(self, fields: dict[str, Any]) -> None:
        if self._coordinator is not None and "order" in fields:
            self._coordinator.expect(Order(**fields["order"]))

    def _write(self, folder: Path, fields: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, FileEntry]:
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, FileEntry] = {}
        if fields["size"]:
            assert self._memory is not None  # `buffer` comes before the first `save`
            with memoryview(self._memory) as memory:
                files[fields["file"]] = write_region(memory, fields["size"], folder / fields["file"])
        for file, data in zip(fields["small"], blobs, strict=True):
            files[file] = write_bytes(data, folder / file)
        return files  # the coordinator fsyncs the folder, once for all ranks

    def _report(self, fields: dict[str, Any]) -> None:
        """Tell the coordinator."""
        link = self._link
        try:
            if link is None:
                raise ConnectionError("no coordinator")
            send(link, fields)
        except OSError:
            # the relay says so too, unless it was cut before; a rank that is told twice is told the same
            self._tell({"op": "cut", "why": "the writer of rank 0 has gone"})

    def _tell(self, fields: dict[str, Any]) -> None:
        """Tell the rank; it may have gone, and then nobody needs to know."""
        with self._sending, suppress(OSError):
            send(self._sock, fields)

    def _complain(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"pctool: {text}\n")
            sys.stderr.flush()
        self._tell({"op": "say", "text": text})


class Server:
    """Fork a writer for each rank that connects, until standard input ends and all of them have."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def serve(self) -> None:
        """Run."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended: the kernel forgets them
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener and not os.read(sys.stdin.fileno(), 4096):
                    self._wait()
                    return
                if key.fileobj is self._listener:
                    self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        with sock:
            if _peer_uid(sock) != os.getuid() or os.fork() != 0:
                return
            self._listener.close()
            self._selector.close()
            code = 1
            try:
                Writer(sock).serve()
                code = 0
            finally:
                os._exit(code)

    def _wait(self) -> None:
        self._listener.close()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)  # with SIGCHLD ignored this returns once the last child has ended


def _listen(host: str) -> socket.socket:
    """Listen where the other nodes reach rank 0; behind an address that is not this node's own, on all of them."""
    try:
        return socket.create_server((host, 0), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", 0), backlog=_BACKLOG)


def _peer_uid(sock: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def main(argv: Sequence[str]) -> int:
    """Run the writer's process."""
    parser = argparse.ArgumentParser(prog="python -m pctool.checkpoint.writer", description=__doc__)
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--fd", type=int, help="file descriptor of the socket that leads to the rank")
    one.add_argument("--listen", type=int, help="file descriptor of the socket that ranks connect to")
    args = parser.parse_args(argv)
    for signum in _IGNORED:  # Slurm sends them to every process of a step; what was copied is to be written yet
        signal.signal(signum, signal.SIG_IGN)
    if args.fd is not None:
        Writer(socket.socket(fileno=args.fd)).serve()
    else:
        Server(socket.socket(fileno=args.listen)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
