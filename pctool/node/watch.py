"""The watcher: look every 2 s whether EC2 wants this node back, and say so once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pctool.aws.imds import Imds, ImdsError, Notice
from pctool.errors import UsageError
from pctool.node.notice_file import Sighting, read_sighting, touch, write_sighting

POLL_S = 2.0  # AWS advises every 5 s at most; of the two minutes each second may count, and a look costs 0.3 ms of CPU

_SLOWEST_S = 3600.0

Log = Callable[[str], None]


def check_poll(seconds: float) -> float:
    """Return the time between two looks. Raise UsageError for one that is none."""
    if not 0 < seconds <= _SLOWEST_S:  # nan too
        raise UsageError(f"--poll-s {seconds:g} is no time between two looks", fix=f"give seconds, such as {POLL_S:g}")
    return seconds


class Looker:
    """Look for a notice: in root's file if that is fresh, else in instance metadata."""

    def __init__(self, *, node: str, imds: Imds, notice_file: Path | None) -> None:
        self.node = node
        self._imds = imds
        self._file = notice_file
        self._rebalance: float | None = None
        self.failure: ImdsError | None = None  # of the last look's question for a rebalance, which is not vital

    def look(self) -> Sighting:
        """Return what is there now. Raise ImdsError if neither source can be read.

        Where only the rebalance recommendation cannot, the last one known stands and `failure` tells: a notice that was
        read must not wait for it.
        """
        self.failure = None
        if self._file is not None:
            sighting = read_sighting(self._file, node=self.node, now=time.time())
            if sighting is not None:
                return sighting
        notice = self._imds.notice()
        try:
            self._rebalance = self._imds.rebalance()
        except ImdsError as error:
            self.failure = error
        return Sighting(node=self.node, notice=notice, rebalance=self._rebalance)


class Changes:
    """Turn looks into news: each notice and recommendation is told once, each kind of failure once until it changes."""

    def __init__(self, *, log: Log) -> None:
        self._log = log
        self._seen = Sighting(node="")
        self._failure: tuple[type[ImdsError], str] | None = None

    def failed(self, error: ImdsError, *, unseen: str = "notice") -> None:
        """Log a failed look unless the one before failed in the same way."""
        if (type(error), unseen) != self._failure:
            self._failure = type(error), unseen
            self._log(f"instance metadata: {error}; a {unseen} would not be seen; trying on")

    def saw(self, sighting: Sighting, failure: ImdsError | None) -> tuple[Notice | None, float | None]:
        """Return the notice and the recommendation time of a look, each only if it is news.

        `failure` is that of the question for a recommendation.
        """
        if failure is not None:
            self.failed(failure, unseen="rebalance recommendation")
        elif self._failure is not None:
            self._failure = None
            self._log("instance metadata answers again")
        before, self._seen = self._seen, sighting
        notice = sighting.notice if sighting.notice != before.notice else None
        rebalance = sighting.rebalance if before.rebalance is None else None
        return notice, rebalance


class Watcher(threading.Thread):
    """Watch as a thread inside launch. The callbacks run in this thread."""

    def __init__(
        self,
        looker: Looker,
        *,
        on_notice: Callable[[Notice], None],
        on_rebalance: Callable[[float], None],
        on_first: Callable[[], None],
        log: Log,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self._looker = looker
        self._changes = Changes(log=log)
        self._on_notice = on_notice
        self._on_rebalance = on_rebalance
        self._on_first = on_first
        self._poll_s = poll_s
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until `stop`; `on_first` is called once, after the first look, whether it succeeded or not."""
        self._look()
        self._on_first()
        while not self._ended.wait(self._poll_s):
            self._look()

    def stop(self) -> None:
        """Ask the thread to end; a look under way is not waited for."""
        self._ended.set()

    def _look(self) -> None:
        try:
            sighting = self._looker.look()
        except ImdsError as error:
            self._changes.failed(error)
            return
        notice, rebalance = self._changes.saw(sighting, self._looker.failure)
        if notice is not None:
            self._on_notice(notice)
        if rebalance is not None:
            self._on_rebalance(rebalance)


class NodeWatch:
    """`pctool watch`: one process a node. With a drain function it is root's watcher."""

    def __init__(
        self,
        *,
        node: str,
        imds: Imds,
        notice_file: Path | None,
        drain: Callable[[str, Notice], str | None] | None,
        report: Callable[[Sighting], None],
        log: Log,
    ) -> None:
        self._looker = Looker(node=node, imds=imds, notice_file=None)
        self._changes = Changes(log=log)
        self._file = notice_file
        self._drain = drain
        self._report = report
        self._log = log
        self._written: Sighting | None = None
        self._undrained: Notice | None = None
        self._drain_failure: str | None = None
        self._file_failure: str | None = None

    def look(self) -> bool:
        """Look once: report news, keep the file, drain. Return whether instance metadata could be read."""
        try:
            sighting = self._looker.look()
        except ImdsError as error:
            self._changes.failed(error)  # the file is left to grow stale, so that launch looks for itself
            return False
        notice, rebalance = self._changes.saw(sighting, self._looker.failure)
        self._keep_file(sighting)
        if notice is not None:
            self._undrained = notice
        if notice is not None or rebalance is not None:
            self._report(sighting)
        self._try_drain(sighting.node)
        return True

    def _keep_file(self, sighting: Sighting) -> None:
        if self._file is None:
            return
        try:
            if sighting == self._written and self._file.exists():
                touch(self._file)
            else:
                write_sighting(self._file, sighting)
            self._written, self._file_failure = sighting, None
        except OSError as error:
            if str(error) != self._file_failure:
                self._file_failure = str(error)
                self._log(f"cannot keep the notice file: {error}")

    def _try_drain(self, node: str) -> None:
        """Drain the node of a notice not yet acted on; a failed try is logged once and repeated at the next look."""
        if self._drain is None or self._undrained is None:
            return
        failure = self._drain(node, self._undrained)
        if failure is None:
            self._log(f"drained {node}: it gets no new job")
            self._undrained = self._drain_failure = None
        elif failure != self._drain_failure:
            self._drain_failure = failure
            self._log(f"cannot drain {node}: {failure}; trying on")
