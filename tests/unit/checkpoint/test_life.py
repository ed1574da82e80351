"""A state machine over a checkpoint's life: the newest complete one is never lost, whatever fails, and whenever.

Files are real; the writer, the coordinator's commit, prune, the mirror and the restore are the product's own. In each
of their calls to the file system and to S3 the process may die, the node lose its power, or the call fail
(`life_faults.py`). What was told to be complete is remembered outside, and everything found later is compared with it.

PCTOOL_LIFE=5000 runs so many histories instead of the few that fit into every test run; do so after a change to what
is saved, restored, mirrored or removed: `PCTOOL_LIFE=5000 pytest tests/unit/checkpoint/test_life.py --timeout 0`.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from life_faults import Answered, Disk, Fault, Faults, MemoryS3

from pctool.checkpoint import lineage, restore
from pctool.checkpoint import manifest as mf
from pctool.checkpoint import mirror as mirroring
from pctool.checkpoint.coordinator import Order
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import BelowDurableError, candidates, find_resume, prune, rejected
from pctool.checkpoint.refs import refer
from pctool.checkpoint.restore import Restorable, find_whole
from pctool.checkpoint.retention import MIN_KEPT, Retention
from pctool.checkpoint.stores import PosixStore, Store
from pctool.checkpoint.writer import Writer
from pctool.errors import FencedError, PctoolError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

EXAMPLES = int(os.environ.get("PCTOOL_LIFE", "60"))
STEPS = 25
RANKS = 2
TIERS = ("posix", "s3")

FAULTS = st.none() | st.builds(
    Fault,
    kind=st.sampled_from(["kill", "power", "error", "full", "lost"]),
    at=st.integers(1, 30) | st.integers(1, 150),
    seed=st.integers(0, 999),
)
KEEPS = st.none() | st.integers(1, 3)


@dataclass
class Attempt:
    """One attempt as far as its ranks remember: where they stand and what they trained on from."""

    number: int
    step: int
    parent: str | None
    saved: set[str] = field(default_factory=set)  # names that were complete, as it was told


class Life(RuleBasedStateMachine):
    """One run. What was promised is in `live`, as long as nothing explains its loss.

    `kept` says on which tier it is; `harmed` what the rules broke there on purpose.
    """

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.run = RunDir(self.root / "run")
        self.run.attempts.mkdir(parents=True)
        self.ledger.append("submitted")
        self.other = RunDir(self.root / "other")
        self.other.path.mkdir()
        self.faults = Faults(Disk(self.root))
        self.s3 = MemoryS3(self.faults)
        self.contents: dict[str, dict[str, bytes]] = {}
        self.parents: dict[str, str | None] = {}
        self.live: set[str] = set()
        self.kept: dict[str, set[str]] = {tier: set() for tier in TIERS}
        self.harmed: dict[str, set[str]] = {tier: set() for tier in TIERS}
        self.referred: set[str] = set()
        self.number, self.saves = -1, 0
        self.now: Attempt | None = None
        self.older: list[Attempt] = []
        self.start(None)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root, ignore_errors=True)

    # what the rules do

    @rule(fault=FAULTS)
    def start(self, fault: Fault | None) -> None:
        """Claim the next attempt and restore."""
        self.leave()
        self.number += 1
        self.run.attempt(self.number).path.mkdir()
        found: list[Restorable[None] | None] = []
        with self.faults.coming(fault), self.stores(), suppress(PctoolError, OSError):
            with self.justified():
                find_resume(self.run, "s3://bucket")
                whole: Restorable[None] | None = find_whole(self.run, "s3://bucket", Group(), self.ledger, self.number)
            self.enter_start(whole)
            found.append(whole)
        if found:
            self.take_up(found[0])

    @precondition(lambda self: self.now)
    @rule(fault=FAULTS, keep=KEEPS, ranks_apart=st.booleans())
    def save(self, fault: Fault | None, keep: int | None, ranks_apart: bool) -> None:
        """Save the next step; where the one before came to nothing, that one once more, as at a stop."""
        now = self.current
        again = checkpoint_name(now.number, now.step)
        if ranks_apart or now.step == 0 or again in now.saved or again == now.parent:
            now.step += 10
        before = self.complete("posix")
        verdict = self.save_as(now, keep, fault)
        self.check_removed("posix", before)
        if verdict.get("op") == "committed":
            self.promise(now, str(verdict["name"]))
        assert not verdict.get("fenced"), "the newest attempt was fenced off"
        if fault is not None and fault.kind in {"kill", "power"} and not verdict:
            self.leave()

    @precondition(lambda self: self.now and self.now.saved)
    @rule(
        fault=FAULTS,
        keep=st.integers(1, 4) | st.builds(Retention, keep_for_s=st.just(1.0), keep_every=st.sampled_from([20, 40])),
    )
    def prune(self, fault: Fault | None, keep: int | Retention) -> None:
        before = self.complete("posix")
        with self.faults.coming(fault), suppress(PctoolError, OSError):
            for name in prune(
                self.run, self.local, self.number, keep, damaged=rejected(self.ledger.read()), now=10_000_000_000.0
            ):
                self.ledger.append("pruned", attempt=self.number, name=name)
        self.check_removed("posix", before)

    @precondition(lambda self: self.now)
    @rule(fault=FAULTS, keep=KEEPS)
    def mirror(self, fault: Fault | None, keep: int | None) -> None:
        before = self.complete("s3")
        whole = self.poke(self.number, keep, fault)
        self.check_copied()
        self.check_removed("s3", before)
        if whole:
            missing = self.live & self.kept["posix"] - self.harmed["posix"] - self.complete("s3", rejected_too=True)
            gone = rejected(self.ledger.read())
            pruned = {event.fields["name"] for event in self.ledger.read() if event.event == "pruned"}
            assert not missing - gone - pruned, "not all is mirrored"

    @precondition(lambda self: self.fenced)
    @rule(data=st.data(), what=st.sampled_from(["save", "prune", "mirror"]))
    def an_older_attempt_goes_on(self, data: st.DataObject, what: str) -> None:
        old = data.draw(st.sampled_from(self.fenced))
        before = {tier: self.manifests(tier) for tier in TIERS}
        if what == "save":
            old.step += 10
            verdict = self.save_as(old, 1, None)
            assert verdict["op"] == "failed"
            assert verdict["fenced"]
        elif what == "prune":
            with suppress(FencedError):
                assert not list(prune(self.run, self.local, old.number, 1))
        else:
            with suppress(FencedError):
                self.poke(old.number, 1, None)
        assert {tier: self.manifests(tier) for tier in TIERS} == before, f"a fenced attempt did {what}"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fault=FAULTS)
    def another_run_refers(self, data: st.DataObject, fault: Fault | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        with self.faults.coming(fault), suppress(PctoolError, OSError):
            refer(self.run, name, self.other)
            self.referred.add(name)

    @precondition(lambda self: len(self.live) >= 2)
    @rule(data=st.data(), tier=st.sampled_from(TIERS), how=st.sampled_from(["flip", "cut", "delete"]))
    def something_is_damaged(self, data: st.DataObject, tier: str, how: str) -> None:
        there = sorted(self.kept[tier] & self.live)
        if not there:
            return
        name = data.draw(st.sampled_from(there[-2:]))
        file = data.draw(st.sampled_from([*sorted(self.contents[name]), mf.NAME]))
        self.harm(tier, name, file, how)
        self.harmed[tier].add(name)

    @rule(data=st.data())
    def the_owner_goes_back(self, data: st.DataObject) -> None:
        """`pctool resume --from STEP`, as pctool.job.resume enters it."""
        self.leave()
        with self.stores():
            there = list(candidates([self.local, cast("Store", self.s3)], self.ledger.read()))
        # an old one first: the more lies above it, the more there is to lose
        chosen = data.draw(st.sampled_from([*(one for one in reversed(there) if one.tiers), None]))
        newest = max((one.attempt for one in there), default=0)
        step, name = (chosen.step, chosen.name) if chosen else (0, None)
        self.ledger.append("accepted", step=step, name=name, run=str(self.run.path), newest=newest)
        self.live = {one for one in self.live if chosen and _order(one) <= _order(chosen.name) and _step(one) <= step}

    # what must hold

    @invariant()
    def what_was_promised_is_there(self) -> None:
        if not hasattr(self, "kept"):
            return
        for tier in TIERS:
            for name in self.kept[tier] - self.harmed[tier]:
                assert self.is_whole(tier, name), f"{name} on {tier} is not what was saved"

    @invariant()
    def the_newest_is_what_a_start_would_find(self) -> None:
        if hasattr(self, "kept"):
            with self.stores(), suppress(BelowDurableError), self.justified():
                point = find_resume(self.run, "s3://bucket")
                self.check_newest(point.name if point else None)

    def check_newest(self, found: str | None) -> None:
        good = {name for name in self.live if self.is_safe(name)}
        if good:
            newest = max(good, key=_order)
            assert found is not None, f"{newest} is lost"
            assert _order(found) >= _order(newest), f"{newest} is lost, {found} is left"
        if found is not None:
            assert found in self.contents, f"{found} was never saved"

    def check_removed(self, tier: str, before: set[str]) -> None:
        """Check what went away by the rules alone: lineage, the least number, refs."""
        after = self.complete(tier)
        complete = before | after
        removed = complete - after
        self.kept[tier] -= {name for name in removed if mf.NAME not in self.files(tier, name)}
        if not removed:
            return
        newest = max(complete, key=_order)
        chain = [name for name in self.ancestry(newest) if name in complete]
        others = complete - set(chain)
        assert len(after) >= min(len(complete), MIN_KEPT), f"{removed} were removed on {tier}, {after} are left"
        assert not removed & set(chain[:MIN_KEPT]), f"{removed} of {chain} were removed on {tier}"
        passed = all(_step(name) < _step(newest) for name in others)
        assert passed or not removed & others, f"{removed & others}: {newest} has not passed that lineage on {tier}"
        assert not removed & self.referred, f"another run needs {removed & self.referred}"

    def check_copied(self) -> None:
        """Check that whatever became complete on S3 is what was saved."""
        for name in self.complete("s3", rejected_too=True) - self.kept["s3"] - self.harmed["s3"]:
            assert self.is_whole("s3", name), f"{name} became complete on S3, and is not what was saved"
            self.kept["s3"].add(name)

    def justified(self) -> _Justified:
        return _Justified(self)

    def is_safe(self, name: str) -> bool:
        return any(name in self.kept[tier] - self.harmed[tier] for tier in TIERS)

    def is_whole(self, tier: str, name: str) -> bool:
        """Judge by what was saved, not by the code under test."""
        files = self.files(tier, name)
        return mf.NAME in files and self.contents[name].items() <= files.items()

    def complete(self, tier: str, *, rejected_too: bool = False) -> set[str]:
        """Return what looks complete, by manifest, names and sizes, and was not found damaged."""
        without = frozenset() if rejected_too else rejected(self.ledger.read())
        found = set()
        for name in {*self.contents} - without:
            files = self.files(tier, name)
            with suppress(ValueError, KeyError):
                said = json.loads(files[mf.NAME])["files"]
                if all(len(files[file]) == entry["size"] for file, entry in said.items()):
                    found.add(name)
        return found

    def ancestry(self, name: str | None) -> Iterable[str]:
        while name is not None:
            yield name
            name = self.parents.get(name)

    # how the product is called

    @property
    def current(self) -> Attempt:
        assert self.now is not None
        return self.now

    @property
    def fenced(self) -> list[Attempt]:
        return [one for one in self.older if one.number < self.number]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.run.ledger)

    @property
    def local(self) -> PosixStore:
        return PosixStore(self.run.checkpoints)

    @contextmanager
    def stores(self) -> Iterator[None]:
        """Have the product find this run's two tiers."""
        opened = lambda *_: [self.local, self.s3]  # noqa: E731
        with (
            mock.patch.object(lineage, "open_stores", opened),
            mock.patch.object(restore, "open_stores", opened),
        ):
            yield

    def leave(self) -> None:
        """The attempt ends, as far as the next one knows."""
        if self.now is not None:
            self.older.append(self.now)
        self.now = None

    def enter_start(self, whole: Restorable[None] | None) -> None:
        if whole is None:
            self.ledger.append("fresh", attempt=self.number)
            return
        point = whole.point
        self.ledger.append("resumed", attempt=self.number, name=point.name, step=point.step, tier=point.tier)

    def take_up(self, whole: Restorable[None] | None) -> None:
        name = whole.point.name if whole else None
        self.check_newest(name)
        if name is not None:
            assert self.is_whole("posix", name), f"{name} was restored, and is not what was saved"
            self.kept["posix"].add(name)
            self.harmed["posix"].discard(name)
            self.live = {other for other in self.live if _order(other) <= _order(name)} | {name}
        else:
            self.live.clear()
        self.now = Attempt(self.number, _step(name) if name else 0, name)

    def promise(self, attempt: Attempt, name: str) -> None:
        attempt.saved.add(name)
        attempt.parent = name
        self.live.add(name)
        self.kept["posix"].add(name)
        self.harmed["posix"].discard(name)

    def save_as(self, attempt: Attempt, keep: int | None, fault: Fault | None) -> dict[str, Any]:
        """Have all ranks write, and rank 0 commit."""
        self.saves += 1
        name = checkpoint_name(attempt.number, attempt.step)
        self.contents[name] = {
            file: f"{name} {file} {self.saves} ".encode() * (1 + rank)
            for rank in range(RANKS)
            for file in (f"__{rank}_0.distcp", f"rng-{rank:05d}.json")
        }
        self.parents[name] = attempt.parent
        order = Order(name=name, step=attempt.step, began=1.0, fields={"parent": attempt.parent, "world_size": RANKS})
        coordinator = Answered(self.run, attempt.number, RANKS, keep)
        with self.faults.coming(fault):
            coordinator.take(order, lambda: self.write(name))
        return coordinator.verdict

    def write(self, name: str) -> dict[str, mf.FileEntry]:
        entries: dict[str, mf.FileEntry] = {}
        for rank in range(RANKS):
            file, small = f"__{rank}_0.distcp", f"rng-{rank:05d}.json"
            data, writer = self.contents[name][file], Writer(cast("socket.socket", None))
            writer._memory = mmap.mmap(-1, mmap.PAGESIZE)  # one that died holds it for a while
            writer._memory.write(data)
            fields = {"file": file, "size": len(data), "small": [small]}
            entries |= writer._write(self.run.checkpoints / name, fields, [self.contents[name][small]])
        return entries

    def poke(self, attempt: int, keep: int | None, fault: Fault | None) -> bool:
        told: list[bool] = []
        # one thread, so that a history is the same each time it is run
        with self.faults.coming(fault), mock.patch("pctool.checkpoint.deliver.FILES_AT_ONCE", 1), suppress(OSError):
            told.append(mirroring.Mirror(self.run, cast("Store", self.s3), attempt, keep=keep).poke())
        return bool(told and told[0])

    def files(self, tier: str, name: str) -> Mapping[str, bytes]:
        if tier == "s3":
            return {file: data for (at, file), data in self.s3.objects.items() if at == name}
        folder = self.run.checkpoints / name
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}

    def manifests(self, tier: str) -> dict[str, bytes]:
        found = {name: self.files(tier, name) for name in self.contents}
        return {name: files[mf.NAME] for name, files in found.items() if mf.NAME in files}

    def harm(self, tier: str, name: str, file: str, how: str) -> None:
        data = self.files(tier, name).get(file)
        if data is None:
            return  # it was harmed before
        worse = {
            "flip": bytes([data[0] ^ 1]) + data[1:] if data else b"x",
            "cut": data[: len(data) // 2],
            "delete": None,
        }[how]
        if tier == "s3":
            self.s3.objects.pop((name, file))
            if worse is not None:
                self.s3.objects[name, file] = worse
            return
        path = self.run.checkpoints / name / file
        path.unlink()
        if worse is not None:
            path.write_bytes(worse)


class _Justified:
    """A start may be held only where the newest one that was promised was harmed on every tier that had it."""

    def __init__(self, life: Life) -> None:
        self.life = life

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, BelowDurableError) and self.life.live:
            newest = max(self.life.live, key=_order)
            assert not self.life.is_safe(newest), f"held, though {newest} is there: {error}"


def _order(name: str) -> tuple[int, int]:
    attempt, step = name.split("-")
    return int(attempt), int(step)


def _step(name: str) -> int:
    return _order(name)[1]


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
)
