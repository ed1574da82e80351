"""Mirror a run's checkpoints to S3: `python -m pctool.checkpoint.mirror RUN STORE --attempt N`.

Launch on node 0 starts this as a process of its own and writes lines to its standard input: `mirror` (something was
committed) and `finish <deadline>` (seconds since the epoch, 0 for none: mirror what is left, then end). It begins by
itself with what an earlier attempt left, and goes on with uploads that one was killed in. The newest unmirrored
checkpoint goes first: where S3 is slower than the training, the older ones are removed before their turn comes. S3
refusing, slow or down never reaches the training: the ledger says what is not mirrored, and it is tried again. Exit
code 0 if all is mirrored, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from pctool.aws.pace import MB, Pace
from pctool.aws.s3 import PARTS_AT_ONCE, S3, OpenUpload
from pctool.checkpoint.deliver import COPY, Copy, Delivery, NotExportedError, delivery_of
from pctool.checkpoint.fence import Watch, check_fence
from pctool.checkpoint.foreign import copied_names, is_foreign, of_another, taken_names, taken_runs, with_other_contents
from pctool.checkpoint.lineage import look, parents_of, prune, rejected, turned_away
from pctool.checkpoint.manifest import judge, said_run
from pctool.checkpoint.mark import under_way
from pctool.checkpoint.orders import EOF, Orders
from pctool.checkpoint.retention import Retention, as_retention, retention_from
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore, Store, order, store_key
from pctool.errors import FencedError, IncompleteError, PctoolError, UsageError
from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.spec.job import MIRROR_WAYS

BACKOFF_S = (5.0, 300.0)  # first and longest wait after a failure; doubled in between
MANIFESTS_AT_ONCE = 16  # read when S3 is looked around in
FINISH_TRIES = 3  # without a deadline


class Uploads(Protocol):
    """What a store has of uploads that were begun and not ended; S3Store has it."""

    def begun(self) -> Mapping[str, Sequence[OpenUpload]]:
        """Return them by checkpoint."""

    def abort(self, upload: OpenUpload) -> None:
        """Drop one; one that is gone is no error."""


class Mirror:
    """Copy what is complete on the shared file system and not on S3, newest first.

    `keep` None: as many are kept on S3 as the ranks say they keep. `delivery` None: the engine copies. `uploads` None:
    the store knows none that could be left open.
    """

    def __init__(
        self,
        run: RunDir,
        remote: Store,
        attempt: int,
        *,
        keep: int | Retention | None = None,
        delivery: Delivery | None = None,
        uploads: Uploads | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.local = PosixStore(run.checkpoints)
        self.remote = remote
        self.attempt = attempt
        self.keep = keep
        self.delivery = delivery or Copy(remote)
        self.uploads = uploads if self.delivery.removes else None  # else they are another's, who is at work on them
        self.clock = clock
        self.ledger = Ledger(run.ledger)
        self.done: set[str] = set()
        self._whole: set[str] = set()  # looked at once, since each look asks for the size of every file
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
        late: dict[str, NotExportedError] = {}
        try:
            left = self.unmirrored()
            for _ in range(len(left)):
                if not left:
                    break
                self._refuse_beside_others()
                try:
                    if not self._there(left[0]):
                        self._mirror_or_pass_over(left[0])
                except NotExportedError as error:  # it will come by itself: the older ones need not wait for it
                    late[left[0]] = error
                left.pop(0)  # should the listing fail, this one is not what is left
                left = [name for name in self.unmirrored() if name not in late]
        except FencedError:
            raise
        except (PctoolError, OSError) as error:
            self._failed([*late, *left], error)
            return False
        if late:
            self._failed([*late, *left], next(iter(late.values())))
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
        self._whole &= set(names)
        self._whole |= {name for name in names if name not in self._whole and look(self.local, name).ok}
        return sorted(self._whole, key=order, reverse=True)

    def mirror(self, name: str) -> None:
        """Copy one checkpoint: data files, the fence checked before each, then MANIFEST."""
        began = self.clock()
        check_fence(self.run, self.attempt)
        with under_way(self.run, self.attempt, name):
            data = self.local.manifest(name)
            verdict = judge(data, self.local.sizes(name), name=name)
            if data is None or verdict.manifest is None:
                raise IncompleteError(verdict.why, where=name)
            self.delivery.files(
                name, self.run.checkpoints / name, verdict.manifest, lambda: check_fence(self.run, self.attempt)
            )
        check_fence(self.run, self.attempt)
        self.delivery.publish(name, data)
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
            self._whole.discard(name)
            if look(self.local, name).ok:
                self.ledger.append("rejected", attempt=self.attempt, name=name, step=step, tier="posix", why=str(error))
                self._abort(name)
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
        whole = judge(theirs, self.remote.sizes(name), name=name).ok
        if not self.delivery.removes:  # what came by itself is there once it has been looked at, every byte
            whole = whole and name in copied_names(self.ledger.read())
        if whole:
            self.done.add(name)
        return whole

    def _look_around(self) -> list[str]:
        """Learn by whom everything on S3 was saved; return the names that have no manifest there."""
        names = self.remote.names()
        self.saved_by = {name: self.saved_by[name] for name in names if name in self.saved_by}
        unread = [name for name in names if name not in self.saved_by]
        with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as pool:
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

    def _tidy(self) -> None:
        """Remove from S3 what is not kept and what was never finished there."""
        if not self.delivery.removes:
            return
        try:
            unfinished = self._look_around()
            events = self.ledger.read()
            self._prune(events)
            self._clear_unfinished(unfinished, events)
            self._abort_orphans(events)
        except FencedError:
            raise
        except (PctoolError, OSError) as error:  # they are in nobody's way: no reason to put off the next copy
            sys.stderr.write(f"pctool: old checkpoints could not be removed from S3: {error}\n")

    def _prune(self, events: list[Event]) -> None:
        """Remove what is not kept, but nothing before this attempt has one of its own there.

        Until then what it goes on from may be an old one, chosen by the owner, that newer ones would push out.
        """
        keep = as_retention(self.keep) if self.keep is not None else self._kept_by_the_ranks(events)
        if keep is None or not any(order(name)[0] == self.attempt for name in self.saved_by):
            return
        others = rejected(events) | self._strangers(events).keys()
        for name in prune(
            self.run, self.remote, self.attempt, keep, damaged=frozenset(others), parents=parents_of(events)
        ):
            self.ledger.append("pruned", attempt=self.attempt, name=name, tier="s3")

    def _kept_by_the_ranks(self, events: list[Event]) -> Retention | None:
        ours = (event for event in reversed(events) if event.event == "committed" and event.attempt == self.attempt)
        return next((Retention.from_fields(event.fields) for event in ours), None)

    def _clear_unfinished(self, unfinished: list[str], events: list[Event]) -> None:
        """Remove copies that will never be finished: of what this run saved and what is no longer to be sent.

        One that the ledger does not know may be another run's, on its way.
        """
        doomed = _committed(events) - copied_names(events) - set(self.unmirrored())
        for name in unfinished:
            if name in doomed:
                self._clear(name)

    def _abort_orphans(self, events: list[Event]) -> None:
        """Abort uploads of what this run saved and what is on S3, gone or not to be sent: none will be gone on with.

        Not where other runs' checkpoints lie there too: they may be called the same.
        """
        if self.uploads is None or self._strangers(events):
            return
        done_with = _committed(events) - set(self.unmirrored())
        for name in sorted(self.uploads.begun().keys() & done_with):
            self._abort(name)

    def _abort(self, name: str) -> None:
        """Abort all uploads of a checkpoint; a newer attempt may be using them, so the fence is checked before each."""
        if self.uploads is None:
            return
        for upload in self.uploads.begun().get(name, ()):
            check_fence(self.run, self.attempt)
            self.uploads.abort(upload)

    def _clear(self, name: str) -> None:
        """Remove an unfinished copy, if it is one of ours."""
        if not self.delivery.removes or self.remote.manifest(name) is not None:
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


def serve(mirror: Mirror, orders: Orders) -> int:
    """Follow the orders until told to finish; return the exit code.

    What earlier attempts left needs no order. A poke also comes when a backoff is over.
    """
    mirror.poke()
    while True:
        waiting = mirror.not_before - mirror.clock() if mirror.not_before else None
        line = orders.next(None if waiting is None else max(waiting, 0.0))
        if line == EOF:
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


def _committed(events: list[Event]) -> set[str]:
    return {str(event.fields.get("name", "")) for event in events if event.event == "committed"}


def _deadline(line: str) -> float:
    words = line.split()
    try:
        return float(words[1])
    except (IndexError, ValueError):
        return 0.0


def _keep(environ: Mapping[str, str]) -> Retention | None:
    """Return what the job says is kept, None where it leaves that to the script."""
    keep = retention_from(environ)
    return keep if keep.removes else None


def _way(environ: Mapping[str, str]) -> str:
    way = environ.get(env.MIRROR) or COPY
    if way not in MIRROR_WAYS:
        raise UsageError(f"{env.MIRROR} is {way!r}", fix=f"use one of: {', '.join(MIRROR_WAYS)}")
    return way


def _rate(environ: Mapping[str, str]) -> float | None:
    """Return the mirror's share in bytes a second, None for no bound."""
    said = environ.get(env.MIRROR_MBPS) or None
    try:
        rate = float(said) * MB if said else None
    except ValueError:
        rate = 0.0
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"{env.MIRROR_MBPS} is {said!r}", fix="write the mirror's share in MB/s, as in 200")
    return rate


def main(argv: Sequence[str]) -> int:
    """Run the mirror process."""
    parser = argparse.ArgumentParser(prog="python -m pctool.checkpoint.mirror", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("store", help="s3://bucket/prefix")
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        run = RunDir(args.run.absolute())
        pace = Pace(_rate(os.environ))
        fence = Watch(run, args.attempt)
        s3 = S3(args.store, ranges_at_once=PARTS_AT_ONCE, pace=pace, check_part=fence.look)
        remote = S3Store(args.store, store_key(run), s3=s3)
        mirror = Mirror(
            run,
            remote,
            args.attempt,
            keep=_keep(os.environ),
            delivery=delivery_of(_way(os.environ), remote),
            uploads=remote,
        )
        # the share is there for the training, and at the end nothing trains any more
        return serve(mirror, Orders(sys.stdin.buffer, on_end=pace.lift))
    except PctoolError as error:
        sys.stderr.write(f"pctool: mirror: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
