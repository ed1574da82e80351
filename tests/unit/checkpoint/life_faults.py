"""What the checkpoint's life needs: a death or an error at any call, a power cut, an S3 that fails, a coordinator.

A power cut takes back what was not made durable, and any subset of it: bytes of a file that was not fsynced, and names
in a folder that was not fsynced since. That is POSIX's promise and no more; real file systems keep more.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.coordinator import Coordinator, Order
from pctool.checkpoint.retention import as_retention
from pctool.checkpoint.stores import check_file, order, published_by_another
from pctool.checkpoint.writing import write_bytes
from pctool.errors import AwsError, IncompleteError
from pctool.run.layout import RunDir, fsync_dir
from pctool.run.ledger import Ledger

T = TypeVar("T")

CHANGING = ("write", "pwrite", "ftruncate", "fsync", "rename", "unlink", "mkdir", "rmdir", "utime")
READING = ("open", "listdir", "scandir", "stat")


class KilledError(BaseException):
    """The process dies here: nothing in it may catch this, and nothing it does afterwards has an effect."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong at the call number `at`, file-system and S3 calls counted together.

    kill: the process dies before it. power: so it does, and its node with it; at the end, if it came so far. error:
    that one call fails. full: so do all that write from then on. lost: S3 did it, and its answer was lost.
    """

    kind: str
    at: int
    seed: int = 0


class Disk:
    """The shared file system below a folder, as far as it has not been made durable yet."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.dirty: dict[str, int] = {}  # file -> how many of its bytes are durable
        self.pending: list[tuple[str, Callable[[], None]]] = []  # (folder, how to take it back), in order

    def change(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Look at what a call is about to change; return what notes it once it is done."""
        path = _path(args[0], kwargs)
        if not path.startswith(self.root):
            return _nothing
        if name == "rename":
            return self._rename(path, _path(args[1], {}))
        if name == "open":
            return self.opening(path, args[1]) if len(args) > 1 else _nothing
        if name in {"write", "pwrite"}:
            size = os.path.getsize(path)
            return lambda: self._soil(path, size)
        if name == "mkdir":
            return lambda: self._pend(path, lambda: shutil.rmtree(path, ignore_errors=True))
        if name == "unlink" and os.path.isfile(path):
            data = Path(path).read_bytes()
            return lambda: self._pend(path, lambda: _put_back(path, data))
        return _nothing

    def opening(self, path: str, flags: int) -> Callable[[], None]:
        """Look at a file that is about to be opened."""
        new = not os.path.exists(path)

        def note() -> None:
            if new and flags & os.O_CREAT:
                self._pend(path, lambda: Path(path).unlink(missing_ok=True))
            if flags & os.O_TRUNC:
                self.dirty[path] = 0

        return note

    def synced(self, path: str) -> None:
        """Note that a file or a folder has been fsynced."""
        self.dirty.pop(path, None)
        self.pending = [(folder, undo) for folder, undo in self.pending if folder != path]

    def lose_power(self, seed: int) -> None:
        """Take back any of what is not durable."""
        chance = random.Random(seed)
        for path, durable in sorted(self.dirty.items()):
            if os.path.isfile(path) and chance.random() < 0.7:
                data = Path(path).read_bytes()
                tail = b"\0" * (len(data) - durable) if chance.random() < 0.5 else b""
                Path(path).write_bytes(data[:durable] + tail)
        for _, undo in reversed(self.pending):
            if chance.random() < 0.7:
                with suppress(OSError):  # what it would bring back lies in a folder that has gone too
                    undo()
        self.dirty.clear()
        self.pending.clear()

    def _soil(self, path: str, durable: int) -> None:
        self.dirty.setdefault(path, durable)

    def _pend(self, path: str, undo: Callable[[], None]) -> None:
        self.pending.append((os.path.dirname(path), undo))

    def _rename(self, source: str, target: str) -> Callable[[], None]:
        old = Path(target).read_bytes() if os.path.isfile(target) else None

        def note() -> None:
            self._pend(target, lambda: Path(target).unlink(missing_ok=True) if old is None else _put_back(target, old))
            self.dirty.pop(target, None)
            if source in self.dirty:
                self.dirty[target] = self.dirty.pop(source)

        return note


class Faults:
    """Lets a fault come in while the product works on a disk, and on S3."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.fault: Fault | None = None
        self.calls = 0
        self._noting = False

    @contextmanager
    def coming(self, fault: Fault | None) -> Iterator[None]:
        """Run what is inside with a fault on its way; a death ends it quietly, an error is the product's to handle."""
        self.fault, self.calls = fault, 0
        patches: dict[str, Any] = {name: self._guarded(name, getattr(os, name)) for name in (*CHANGING, *READING)}
        try:
            with mock.patch.multiple(os, **patches), mock.patch.object(io, "open", self._guarded_io(io.open)):
                yield
        except KilledError:
            pass
        finally:
            self.fault = None
            if fault is not None and fault.kind == "power":
                self.disk.lose_power(fault.seed)

    def gate(self, effect: Callable[[], T]) -> T:
        """Do something on S3, or fail at it."""
        kind = self._due()
        if kind in {"kill", "power"}:
            raise KilledError
        if kind == "lost":
            effect()
        if kind:
            raise AwsError("injected: no answer from S3", where="s3://bucket")
        return effect()

    def _due(self, *, writes: bool = True) -> str:
        """Count a call; return what becomes of it, "" if it is done."""
        self.calls += 1
        fault = self.fault
        if fault is None or self.calls < fault.at:
            return ""
        if fault.kind in {"kill", "power"} or (fault.kind == "full" and writes) or self.calls == fault.at:
            return fault.kind
        return ""

    def _check(self, *, writes: bool, where: Any) -> None:
        kind = self._due(writes=writes)
        if kind in {"kill", "power"}:
            raise KilledError
        if kind and (kind != "full" or writes):
            code = errno.ENOSPC if kind == "full" else errno.EIO
            raise OSError(code, f"injected: {os.strerror(code)}", where if isinstance(where, str | Path) else None)

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._noting:
                return real(*args, **kwargs)
            # a full disk lets files be removed
            self._check(writes=name in {"write", "pwrite", "mkdir", "rename"}, where=args[0] if args else None)
            note = self._note(lambda: self.disk.change(name, args, kwargs))
            if name == "fsync":  # the disk knows what it means; the real one would only take its time
                self._note(lambda: self.disk.synced(_path(args[0], {})))
                return None
            result = real(*args, **kwargs)
            note()
            return result

        return call

    def _guarded_io(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self._noting:
                return real(file, mode, *args, **kwargs)
            self._check(writes="w" in mode, where=file)
            flags = os.O_CREAT | os.O_TRUNC if "w" in mode else 0
            note = self._note(lambda: self.disk.opening(str(file), flags))
            result = real(file, mode, *args, **kwargs)
            note()
            return result

        return call

    def _note(self, look: Callable[[], T]) -> T:
        """Look at the disk by the calls as they are."""
        self._noting = True
        try:
            return look()
        finally:
            self._noting = False


class MemoryS3:
    """Stands for S3: one namespace of whole objects, conditional puts, each call of which may fail."""

    tier = "s3"
    where = "s3://bucket/run/checkpoints"

    def __init__(self, faults: Faults) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self._gate = faults.gate

    def names(self) -> list[str]:
        """List the folders."""
        return self._gate(lambda: sorted({name for name, _ in self.objects}, key=order))

    def manifest(self, name: str) -> bytes | None:
        """Get one manifest."""
        return self._gate(lambda: self.objects.get((name, mf.NAME)))

    def sizes(self, name: str) -> dict[str, int]:
        """List one folder."""
        return self._gate(lambda: {file: len(data) for (at, file), data in self.objects.items() if at == name})

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        """Put one object, whole or not at all."""
        check_file(source, entry)
        data = source.read_bytes()
        self._gate(lambda: self.objects.__setitem__((name, file), data))

    def publish(self, name: str, data: bytes) -> None:
        """Put the manifest if none is there."""
        if self._gate(lambda: self.objects.setdefault((name, mf.NAME), data)) != data:
            raise published_by_another(f"{self.where}/{name}/{mf.NAME}")

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Get one object."""
        data = self._gate(lambda: self.objects.get((name, file)))
        if data is None:
            raise IncompleteError("missing", where=f"{self.where}/{name}/{file}")
        part = target.with_name(f"{target.name}.part")
        write_bytes(data, part)
        part.rename(target)
        fsync_dir(target.parent)

    def remove(self, name: str) -> None:
        """Delete one by one, the manifest first."""
        for file in [mf.NAME, *sorted(self.sizes(name))]:
            self._gate(lambda file=file: self.objects.pop((name, file), None))  # type: ignore[misc]


class Answered(Coordinator):
    """Rank 0's coordinator from the moment on when everybody has answered: without its thread and its sockets."""

    def __init__(self, run: RunDir, attempt: int, ranks: int, keep: int | None) -> None:
        self.run, self.attempt, self.world, self.keep = run, attempt, ranks, as_retention(keep)
        self._ledger = Ledger(run.ledger)
        self._page, self._ranks, self._say = None, {}, lambda _: None
        self.verdict: dict[str, Any] = {}

    def _broadcast(self, fields: dict[str, Any]) -> None:
        self.verdict = fields

    def take(self, order: Order, write: Callable[[], dict[str, mf.FileEntry]]) -> dict[str, Any]:
        """Commit what the ranks write, or give it up; return what is said to all, {} where it was never said."""
        try:
            files = write()
        except OSError as error:
            self._give_up(order.name, order, str(error))
        else:
            self._commit(order, files)
        return self.verdict


def _path(path: Any, kwargs: dict[str, Any]) -> str:
    """Return the path of a call's argument: a path, one relative to a folder's descriptor, or a descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    folder = kwargs.get("dir_fd")
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if folder is not None else os.fspath(path)


def _nothing() -> None:
    """Note nothing."""


def _put_back(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(data)
