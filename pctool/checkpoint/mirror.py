"""Mirror a run's checkpoints to S3: `python -m pctool.checkpoint.mirror RUN STORE --attempt N`.

Launch on node 0 starts this as a process of its own and writes lines to its standard input: `mirror` (something was
committed) and `finish <deadline>` (seconds since the epoch, 0 for none: mirror what is left, then end). The oldest
unmirrored checkpoint goes first, also where an earlier attempt left it. S3 refusing, slow or down never reaches the
training: the ledger says what is not mirrored, and it is tried again. Exit code 0 if all is mirrored, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.lineage import look, prune, rejected
from pctool.checkpoint.manifest import Manifest, encode
from pctool.checkpoint.stores import PosixStore, Store, order, store_key
from pctool.errors import FencedError, IncompleteError, PctoolError
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger

BACKOFF_S = (5.0, 300.0)  # first and longest wait after a failure; doubled in between
FILES_AT_ONCE = 4  # one stream to S3 moves about 100 MB/s, and each holds a part in memory
FINISH_TRIES = 3  # without a deadline


class Mirror:
    """Copy what is complete on the shared file system and not on S3, oldest first."""

    def __init__(
        self,
        run: RunDir,
        remote: Store,
        attempt: int,
        *,
        keep: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.local = PosixStore(run.checkpoints)
        self.remote = remote
        self.attempt = attempt
        self.keep = keep
        self.clock = clock
        self.ledger = Ledger(run.ledger)
        self.done: set[str] = set()
        self.backoff = 0.0
        self.not_before = 0.0

    def poke(self) -> bool:
        """Mirror all that is unmirrored; return whether all is. Nothing is tried before a backoff is over.

        Raises FencedError if a newer attempt has taken over.
        """
        if self.clock() < self.not_before:
            return False
        left: list[str] = []
        try:
            left = self.unmirrored()
            while left:
                if not self._there(left[0]):
                    self._mirror_or_reject(left[0])
                left.pop(0)
        except FencedError:
            raise
        except (PctoolError, OSError) as error:
            self._failed(left, error)
            return False
        self.backoff, self.not_before = 0.0, 0.0
        self._prune()
        return True

    def unmirrored(self) -> list[str]:
        """Return the names of the complete checkpoints that are not known to be on S3, oldest first."""
        damaged = rejected(self.ledger.read())
        names = [name for name in self.local.names() if name not in self.done | damaged]
        return sorted((name for name in names if look(self.local, name).ok), key=order)

    def mirror(self, name: str) -> None:
        """Copy one checkpoint: data files, several at a time, then the fence, then MANIFEST."""
        began = self.clock()
        check_fence(self.run, self.attempt)
        verdict = look(self.local, name)
        if verdict.manifest is None:
            raise IncompleteError(verdict.why, where=name)
        self._put_files(name, verdict.manifest)
        check_fence(self.run, self.attempt)
        self.remote.publish(name, self.local.manifest(name) or encode(verdict.manifest))
        self.done.add(name)
        self.ledger.append(
            "mirrored",
            attempt=self.attempt,
            name=name,
            step=verdict.manifest.step,
            seconds=round(self.clock() - began, 3),
            bytes=verdict.manifest.bytes,
        )

    def _mirror_or_reject(self, name: str) -> None:
        """Mirror one; a damaged one is named and passed over, so that it does not keep back the newer ones."""
        try:
            self.mirror(name)
        except (IncompleteError, FileNotFoundError) as error:
            if not look(self.local, name).ok:
                return  # pruned meanwhile
            self.ledger.append(
                "rejected", attempt=self.attempt, name=name, step=order(name)[1], tier="posix", why=str(error)
            )

    def _there(self, name: str) -> bool:
        if look(self.remote, name).ok:
            self.done.add(name)
            return True
        return False

    def _put_files(self, name: str, manifest: Manifest) -> None:
        folder = self.run.checkpoints / name
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            copies = [
                pool.submit(self.remote.put, name, file, folder / file, entry)
                for file, entry in sorted(manifest.files.items())
            ]
            try:
                for copy in copies:
                    copy.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _prune(self) -> None:
        if self.keep is None:
            return
        try:
            damaged = rejected(self.ledger.read())
            for name in prune(self.run, self.remote, self.attempt, self.keep, damaged=damaged):
                self.ledger.append("pruned", attempt=self.attempt, name=name, tier="s3")
        except FencedError:
            raise
        except (PctoolError, OSError) as error:  # they are in nobody's way: no reason to put off the next copy
            sys.stderr.write(f"pctool: old checkpoints could not be removed from S3: {error}\n")

    def _failed(self, left: list[str], error: Exception) -> None:
        sys.stderr.write(f"pctool: {', '.join(left) or 'checkpoints'} not mirrored: {error}\n")
        self.backoff = min(max(2 * self.backoff, BACKOFF_S[0]), BACKOFF_S[1])
        self.not_before = self.clock() + self.backoff
        if not left:
            return  # the run directory could not be read, so which ones they are is not known
        event = {"name": left[0], "step": order(left[0])[1], "error": str(error), "waiting": left[1:]}
        try:
            self.ledger.append("mirror-failed", attempt=self.attempt, **event)
        except OSError as unwritten:  # a full run directory must not end the mirror: S3 may be all there is
            sys.stderr.write(f"pctool: {self.ledger.path} cannot be written: {unwritten}\n")


class Orders:
    """The lines on standard input."""

    def __init__(self, stream: BinaryIO) -> None:
        self._fd = stream.fileno()
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)

    def next(self, timeout: float | None) -> str | None:
        """Return the next line, None when `timeout` seconds are over, "eof" once the writer has gone."""
        while b"\n" not in self._buffer:
            if not self._selector.select(timeout):
                return None
            data = os.read(self._fd, 4096)
            if not data:
                return "eof"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").strip()


def serve(mirror: Mirror, orders: Orders) -> int:
    """Follow the orders until told to finish; return the exit code. A poke also comes when a backoff is over."""
    while True:
        waiting = mirror.not_before - mirror.clock() if mirror.not_before else None
        line = orders.next(None if waiting is None else max(waiting, 0.0))
        if line == "eof":
            return finish(mirror, mirror.clock())  # launch has gone: one more try, and no waiting for S3
        if line is not None and line.startswith("finish"):
            return finish(mirror, _deadline(line))
        mirror.poke()


def finish(mirror: Mirror, deadline: float) -> int:
    """Mirror what is left until the deadline (0: FINISH_TRIES tries); return 0 if all is mirrored, 1 if not."""
    mirror.not_before, mirror.backoff = 0.0, 0.0
    tries = 0
    while True:
        tries += 1
        if mirror.poke():
            return 0
        if tries >= FINISH_TRIES if not deadline else mirror.not_before >= deadline:
            return 1
        time.sleep(max(mirror.not_before - mirror.clock(), 0.0))  # the backoff: there is nothing to wait for on S3


def _deadline(line: str) -> float:
    words = line.split()
    try:
        return float(words[1])
    except (IndexError, ValueError):
        return 0.0


def main(argv: Sequence[str]) -> int:
    """Run the mirror process."""
    parser = argparse.ArgumentParser(prog="python -m pctool.checkpoint.mirror", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("store", help="s3://bucket/prefix")
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    keep = os.environ.get(env.KEEP, "")
    try:
        from pctool.checkpoint.s3store import S3Store

        run = RunDir(args.run.absolute())
        remote = S3Store(args.store, store_key(run))
        mirror = Mirror(run, remote, args.attempt, keep=int(keep) if keep.isdigit() else None)
        return serve(mirror, Orders(sys.stdin.buffer))
    except PctoolError as error:
        sys.stderr.write(f"pctool: mirror: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
