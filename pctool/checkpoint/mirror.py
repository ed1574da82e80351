"""Mirror a run's checkpoints to S3: `python -m pctool.checkpoint.mirror RUN STORE --attempt N`.

Launch on node 0 starts this as a process of its own and writes lines to its standard input: `mirror` (something was
committed) and `finish <deadline>` (seconds since the epoch, 0 for none: mirror what is left, then end). It begins by
itself with what an earlier attempt left. The newest unmirrored checkpoint goes first: where S3 is slower than the
training, the older ones are removed before their turn comes. S3 refusing, slow or down never reaches the training: the
ledger says what is not mirrored, and it is tried again. Exit code 0 if all is mirrored, 1 if not.
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
from pctool.checkpoint.foreign import copied_names, is_foreign, of_another, taken_names, taken_runs, with_other_contents
from pctool.checkpoint.lineage import look, parents_of, prune, rejected, turned_away
from pctool.checkpoint.manifest import Manifest, judge, said_run
from pctool.checkpoint.mark import under_way
from pctool.checkpoint.stores import PosixStore, Store, order, store_key
from pctool.errors import FencedError, IncompleteError, PctoolError
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger

BACKOFF_S = (5.0, 300.0)  # first and longest wait after a failure; doubled in between
FILES_AT_ONCE = 4  # one stream to S3 moves about 100 MB/s, and each holds a part in memory
FINISH_TRIES = 3  # without a deadline


class Mirror:
    """Copy what is complete on the shared file system and not on S3, newest first.

    `keep` None: as many are kept on S3 as the ranks say they keep.
    """

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
        self.saved_by: dict[str, str] = {}  # name on S3 -> its manifest's `run`; a manifest that is there never changes
        self.backoff = 0.0
        self.not_before = 0.0

    def poke(self) -> bool:
        """Mirror what is unmirrored; return whether all is. Nothing is tried before a backoff is over.

        As many are tried as were unmirrored at its begin, the newest at each turn: where training saves faster than S3
        takes them, this ends all the same, and old ones are removed from S3. Each save is told: another poke follows.
        Raises FencedError if a newer attempt has taken over.
        """
        if self.clock() < self.not_before:
            return False
        left: list[str] = []
        try:
            left = self.unmirrored()
            for _ in range(len(left)):
                if not left:
                    break
                self._refuse_beside_others()
                if not self._there(left[0]):
                    self._mirror_or_pass_over(left[0])
                left.pop(0)  # should the listing fail, this one is not what is left
                left = self.unmirrored()
        except FencedError:
            raise
        except (PctoolError, OSError) as error:
            self._failed(left, error)
            return False
        self.backoff, self.not_before = 0.0, 0.0
        self._tidy()
        return not left

    def unmirrored(self) -> list[str]:
        """Return the names of the complete checkpoints that are not known to be on S3, newest first.

        What the owner turned away from is none of them: were it called mirrored, it would pass for the run's newest.
        """
        events = self.ledger.read()
        passed_over, abandoned = self.done | rejected(events), turned_away(events)
        names = [name for name in self.local.names() if name not in passed_over and not abandoned(name)]
        return sorted((name for name in names if look(self.local, name).ok), key=order, reverse=True)

    def mirror(self, name: str) -> None:
        """Copy one checkpoint: data files, several at a time, then the fence, then MANIFEST."""
        began = self.clock()
        check_fence(self.run, self.attempt)
        with under_way(self.run, self.attempt, name):
            data = self.local.manifest(name)
            verdict = judge(data, self.local.sizes(name))
            if data is None or verdict.manifest is None:
                raise IncompleteError(verdict.why, where=name)
            self._put_files(name, verdict.manifest)
        check_fence(self.run, self.attempt)
        self.remote.publish(name, data)
        self.done.add(name)
        self.ledger.append(
            "mirrored",
            attempt=self.attempt,
            name=name,
            step=verdict.manifest.step,
            seconds=round(self.clock() - began, 3),
            bytes=verdict.manifest.bytes,
        )

    def _mirror_or_pass_over(self, name: str) -> None:
        """Mirror one; what is damaged or gone is named and passed over, so that it keeps back no other."""
        step = order(name)[1]
        try:
            self.mirror(name)
        except (IncompleteError, FileNotFoundError) as error:
            if look(self.local, name).ok:
                self.ledger.append("rejected", attempt=self.attempt, name=name, step=step, tier="posix", why=str(error))
                return
            why = f"it was removed from the shared file system before it was copied whole ({error})"
            self.ledger.append("mirror-failed", attempt=self.attempt, name=name, step=step, error=why, waiting=[])
            self._clear(name)

    def _there(self, name: str) -> bool:
        """Return whether S3 has it whole. Raise ForeignCheckpointError for another one of that name, ours kept back."""
        theirs, ours = self.remote.manifest(name), self.local.manifest(name)
        if theirs is None:
            return False
        if ours is not None and ours != theirs:
            raise with_other_contents(f"{self.remote.where}/{name}")
        whole = judge(theirs, self.remote.sizes(name)).ok
        if whole:
            self.done.add(name)
        return whole

    def _look_around(self) -> list[str]:
        """Learn by whom everything on S3 was saved; return the names that have no manifest there."""
        names = self.remote.names()
        self.saved_by = {name: self.saved_by[name] for name in names if name in self.saved_by}
        unread = [name for name in names if name not in self.saved_by]
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            found = dict(zip(unread, pool.map(self.remote.manifest, unread), strict=True))
        self.saved_by |= {name: said_run(data) for name, data in found.items() if data is not None}
        return [name for name, data in found.items() if data is None]

    def _strangers(self, events: list[Event]) -> dict[str, str]:
        """Return what S3 has of other runs (name -> run); what this run copied there is its own wherever it moved."""
        copied = copied_names(events)
        return {
            name: saved_by
            for name, saved_by in self.saved_by.items()
            if is_foreign(self.run, saved_by) and name not in copied
        }

    def _is_copy(self, name: str) -> bool:
        ours = self.local.manifest(name)
        return ours is not None and ours == self.remote.manifest(name)

    def _refuse_beside_others(self) -> None:
        """Raise ForeignCheckpointError where S3 has what another run saved and the owner did not take over."""
        self._look_around()
        events = self.ledger.read()
        taken, runs = taken_names(events), taken_runs(events)
        for name, saved_by in self._strangers(events).items():
            if name not in taken and saved_by not in runs and not self._is_copy(name):
                raise of_another(self.run, self.remote.where, saved_by)

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

    def _tidy(self) -> None:
        """Remove from S3 what is not kept and what was never finished there."""
        try:
            unfinished = self._look_around()
            events = self.ledger.read()
            self._prune(events)
            self._clear_unfinished(unfinished, events)
        except FencedError:
            raise
        except (PctoolError, OSError) as error:  # they are in nobody's way: no reason to put off the next copy
            sys.stderr.write(f"pctool: old checkpoints could not be removed from S3: {error}\n")

    def _prune(self, events: list[Event]) -> None:
        """Remove what is not kept, but nothing before this attempt has one of its own there.

        Until then what it goes on from may be an old one, chosen by the owner, that newer ones would push out.
        """
        keep = self.keep if self.keep is not None else self._kept_by_the_ranks(events)
        if keep is None or not any(order(name)[0] == self.attempt for name in self.saved_by):
            return
        others = rejected(events) | self._strangers(events).keys()
        for name in prune(
            self.run, self.remote, self.attempt, keep, damaged=frozenset(others), parents=parents_of(events)
        ):
            self.ledger.append("pruned", attempt=self.attempt, name=name, tier="s3")

    def _kept_by_the_ranks(self, events: list[Event]) -> int | None:
        ours = (event for event in reversed(events) if event.event == "committed" and event.attempt == self.attempt)
        said = next((event.fields.get("keep") for event in ours), None)
        return int(said) if said is not None else None

    def _clear_unfinished(self, unfinished: list[str], events: list[Event]) -> None:
        """Remove copies that will never be finished: of what this run saved and what is no longer to be sent.

        One that the ledger does not know may be another run's, on its way.
        """
        saved = {str(event.fields.get("name", "")) for event in events if event.event == "committed"}
        doomed = saved - copied_names(events) - set(self.unmirrored())
        for name in unfinished:
            if name in doomed:
                self._clear(name)

    def _clear(self, name: str) -> None:
        """Remove an unfinished copy."""
        if self.remote.manifest(name) is not None:
            return
        check_fence(self.run, self.attempt)
        self.remote.remove(name)
        if self.local.manifest(name) is None:  # else it is there yet, whatever is wrong with it
            self.ledger.append("pruned", attempt=self.attempt, name=name, tier="s3")

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
    """Follow the orders until told to finish; return the exit code.

    What earlier attempts left needs no order. A poke also comes when a backoff is over.
    """
    mirror.poke()
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
        if tries >= FINISH_TRIES if not deadline else max(mirror.not_before, mirror.clock()) >= deadline:
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
