"""A state machine over a checkpoint's life, on real files: the newest complete one is never lost, whatever crashes.

Save, commit, mirror, prune and resume run as the product runs them, except that each system call that changes a file
may be the last one of its process. What a commit or a mirror has promised is remembered outside, and each resume is
compared with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.fence import check_fence
from pctool.checkpoint.lineage import find_resume, prune, rejected
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.refs import refer
from pctool.checkpoint.retention import MIN_KEPT, Retention
from pctool.checkpoint.stores import PosixStore, Store
from pctool.errors import FencedError, IncompleteError, NotFoundError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

FILES = ("a", "b")
CALLS = ("open", "write", "rename", "unlink", "rmdir", "mkdir", "fsync")


class CrashError(BaseException):
    """The process dies here: nothing in it may catch this."""


class RemoteStore(PosixStore):
    """Stands for S3: the same contract, another folder, another tier."""

    tier = "s3"


@contextmanager
def crashing(after: int | None) -> Iterator[None]:
    """Let the process die at its `after`-th file operation; None: not at all."""
    left = [after if after is not None else 10**9]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise CrashError
            return real(*args, **kwargs)

        return call

    patches: dict[str, Any] = {name: dying(getattr(os, name)) for name in CALLS}
    with mock.patch.multiple(os, **patches):
        try:
            yield
        except CrashError:
            pass


CRASH = st.none() | st.integers(0, 40)


class Life(RuleBasedStateMachine):
    """One run; `attempt` is the current attempt, `stale` an older one that still lives."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.run = RunDir(self.root / "run")
        self.run.path.mkdir()
        self.attempt, self.step = -1, 0
        self.parent: str | None = None
        self.promised: list[str] = []  # complete, as somebody was told; the order they became so
        self.harmed: set[str] = set()
        self.held: set[str] = set()  # another run refers to them
        self.other = RunDir(self.root / "other")
        self.other.path.mkdir()
        self.claim()

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.ledger)

    @property
    def local(self) -> PosixStore:
        return PosixStore(self.run.checkpoints)

    @property
    def remote(self) -> Store:
        return RemoteStore(self.root / "remote")

    def claim(self) -> None:
        """Start the next attempt where the product says."""
        self.attempt += 1
        self.run.attempt(self.attempt).path.mkdir(parents=True)
        point = self.find()
        self.assert_not_lost(point)
        if point is None:
            self.ledger.append("fresh", attempt=self.attempt)
            self.parent, self.step = None, 0
        else:
            self.ledger.append("resumed", attempt=self.attempt, name=point, step=_step(point))
            self.parent, self.step = point, _step(point)
        # what lay above is left behind knowingly: it was damaged
        self.promised = [name for name in self.promised if _step(name) <= self.step]

    def find(self) -> str | None:
        stores = [self.local, self.remote]
        with mock.patch("pctool.checkpoint.lineage.open_stores", return_value=stores):
            point = find_resume(self.run, None)
        return point.name if point else None

    def save_as(self, attempt: int, step: int, crash: int | None) -> str:
        """Write a checkpoint of an attempt: files, fence, manifest, ledger."""
        name = checkpoint_name(attempt, step)
        folder = self.run.checkpoints / name
        with crashing(crash):
            self.local.remove(name)
            folder.mkdir(parents=True)
            for file in FILES:
                (folder / file).write_bytes(f"{name} {file}".encode())
            check_fence(self.run, attempt)
            entries = {file: mf.describe_file(folder / file) for file in FILES}
            manifest = mf.Manifest(
                run="run", attempt=attempt, step=step, parent=self.parent, world_size=1, files=entries, time=1.0
            )
            self.local.publish(name, mf.encode(manifest))
            self.promised.append(name)
            self.parent = name
            self.ledger.append("committed", attempt=attempt, name=name, step=step)
        return name

    @rule(crash=CRASH)
    def save(self, crash: int | None) -> None:
        self.step += 10
        self.save_as(self.attempt, self.step, crash)
        if crash is not None:
            self.claim()

    @precondition(lambda self: self.attempt > 0)
    @rule(ahead=st.integers(1, 5))
    def a_stale_attempt_saves(self, ahead: int) -> None:
        try:
            self.save_as(self.attempt - 1, self.step + 10 * ahead, None)
        except FencedError:
            return
        raise AssertionError("an older attempt has published a checkpoint")

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), crash=CRASH)
    def another_run_refers(self, data: st.DataObject, crash: int | None) -> None:
        name = data.draw(st.sampled_from(self.promised))
        with crashing(crash), suppress(NotFoundError, IncompleteError):
            refer(self.run, name, self.other)
            self.held.add(name)

    @rule(keep=st.integers(1, 4) | st.builds(Retention, keep_for_s=st.just(1.0), keep_every=st.just(20)), crash=CRASH)
    def prune(self, keep: int | Retention, crash: int | None) -> None:
        before = self.whole()
        with crashing(crash):
            damaged = rejected(self.ledger.read())
            for name in prune(self.run, self.local, self.attempt, keep, damaged=damaged):
                self.ledger.append("pruned", attempt=self.attempt, name=name)
        least = max(keep, MIN_KEPT) if isinstance(keep, int) else MIN_KEPT
        assert self.whole() >= min(before, least), "too many were removed"
        assert all((self.run.checkpoints / name / mf.NAME).exists() for name in self.held), "another run needs it"
        self.promised = [name for name in self.promised if (self.run.checkpoints / name / mf.NAME).exists()]
        if crash is not None:
            self.claim()

    @rule(crash=CRASH)
    def mirror(self, crash: int | None) -> None:
        with crashing(crash), mock.patch("pctool.checkpoint.deliver.FILES_AT_ONCE", 1):
            assert Mirror(self.run, self.remote, self.attempt).poke()
            whole = [name for name in self.local.names() if self.is_whole(self.run.checkpoints / name)]
            assert all(self.is_whole(self.root / "remote" / name) for name in whole), "not all is mirrored"

    @rule()
    def lose_the_node(self) -> None:
        self.claim()

    @precondition(lambda self: len(self.promised) >= 2)
    @rule()
    def damage_the_newest(self) -> None:
        """It is cut short on the shared file system: an explained loss, unless S3 has it."""
        name = self.promised[-1]
        path = self.run.checkpoints / name / FILES[0]
        if path.exists():
            path.write_bytes(b"")
            self.harmed.add(name)
            self.claim()

    @invariant()
    def the_newest_complete_one_is_never_lost(self) -> None:
        if hasattr(self, "promised"):
            self.assert_not_lost(self.find())

    def assert_not_lost(self, found: str | None) -> None:
        good = [name for name in self.promised if name not in self.harmed or self.is_whole(self.root / "remote" / name)]
        if good:
            assert found is not None, f"{good[-1]} is lost"
            assert _order(found) >= _order(good[-1]), f"{good[-1]} is lost, {found} is left"
        if found is not None:
            folders = (self.run.checkpoints / found, self.root / "remote" / found)
            assert any(self.is_whole(folder) for folder in folders), f"{found} is not whole"

    def is_whole(self, folder: Path) -> bool:
        """Judge a folder by what was written into it, not by the code under test."""
        texts = {file: f"{folder.name} {file}" for file in FILES}
        there = all((folder / file).exists() and (folder / file).read_text() == text for file, text in texts.items())
        return there and (folder / mf.NAME).exists()

    def whole(self) -> int:
        return sum(self.is_whole(self.run.checkpoints / name) for name in self.local.names())


def _order(name: str) -> tuple[int, int]:
    attempt, step = name.split("-")
    return int(attempt), int(step)


def _step(name: str) -> int:
    return _order(name)[1]


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
