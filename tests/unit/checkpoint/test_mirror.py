"""The mirror beside a training that saves, prunes and turns back: what it copies, passes over, removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.fence import Watch
from pctool.checkpoint.lineage import look, prune
from pctool.checkpoint.mark import marked, under_way
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.stores import PosixStore
from pctool.errors import FencedError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

FILES = ("a", "b")


class Remote(PosixStore):
    """Stands for S3; `meanwhile` is what else happens before each file is copied."""

    tier = "s3"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.copied: list[str] = []

    def meanwhile(self, name: str) -> None:
        """Do nothing."""

    def put(self, name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        self.meanwhile(name)
        super().put(name, file, source, entry)
        self.copied.append(f"{name}/{file}")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    return run


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setattr("pctool.checkpoint.deliver.FILES_AT_ONCE", 1)  # so that `meanwhile` comes in order
    return Remote(tmp_path / "remote")


def save(run: RunDir, attempt: int, step: int, parent: str | None = None, **fields: object) -> str:
    name, source, entries = checkpoint_name(attempt, step), run.path / "source", {}
    store = PosixStore(run.checkpoints)
    for file in FILES:
        source.write_bytes(f"{name} {file}".encode())
        entries[file] = mf.describe_file(source)
        store.put(name, file, source, entries[file])
    manifest = mf.Manifest(run=str(run.path), attempt=attempt, step=step, parent=parent, world_size=1, files=entries)
    store.publish(name, mf.encode(manifest))
    Ledger(run.ledger).append("committed", attempt=attempt, name=name, step=step, parent=parent, **fields)
    return name


def ranks_prune(run: RunDir, attempt: int, keep: int) -> None:
    ledger = Ledger(run.ledger)
    for name in prune(run, PosixStore(run.checkpoints), attempt, keep):
        ledger.append("pruned", attempt=attempt, name=name, tier="posix")


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [event.fields for event in Ledger(run.ledger).read() if event.event == kind]


def steps(run: RunDir, kind: str) -> list[object]:
    return [event["step"] for event in events(run, kind)]


def whole(remote: Remote) -> list[str]:
    return [name for name in remote.names() if look(remote, name).ok]


def test_what_is_under_way_is_not_pruned_and_the_newest_goes_next(
    run: RunDir, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While each copy lasts, training saves and prunes more than it keeps."""
    parents = [save(run, 0, 10)]

    def train_on(_: str) -> None:
        if len(parents) < 20:
            parents.append(save(run, 0, 10 * (len(parents) + 1), parents[-1]))
            ranks_prune(run, 0, 2)

    monkeypatch.setattr(remote, "meanwhile", train_on)
    mirror, pokes = Mirror(run, remote, 0, keep=2), 1
    while not mirror.poke():
        pokes += 1
        assert len(whole(remote)) <= 3, "old ones stay on S3 as long as the mirror lags behind"
    assert pokes > 5, "a poke goes on as long as training does"
    assert len(parents) == 20
    assert steps(run, "mirror-failed") == []
    assert steps(run, "mirrored")[:3] == [10, 30, 50]  # two files each, and a save before each
    assert whole(remote) == remote.names()
    assert whole(remote)[-1] == parents[-1]
    assert len(whole(remote)) == 2, "what is not kept is removed although not every parent is on S3"


def test_the_mark_spares_one_for_its_own_attempt_only(run: RunDir) -> None:
    first = save(run, 0, 10)
    second = save(run, 0, 20, first)
    save(run, 0, 30, second)
    with under_way(run, 0, first):
        assert marked(run, 0) == first
        assert list(prune(run, PosixStore(run.checkpoints), 0, 2)) == []
        run.attempt(1).path.mkdir()
        assert list(prune(run, PosixStore(run.checkpoints), 1, 2)) == [first]
    assert marked(run, 0) is None


@pytest.mark.parametrize("copied", [0, 1])
def test_one_that_is_gone_before_it_is_copied_is_named_and_leaves_nothing_on_s3(
    run: RunDir, remote: Remote, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    first, second = save(run, 0, 10), save(run, 0, 20)

    def remove(name: str) -> None:
        if len(remote.copied) == copied and name == second:
            PosixStore(run.checkpoints).remove(name)

    monkeypatch.setattr(remote, "meanwhile", remove)
    assert Mirror(run, remote, 0).poke()
    (failed,) = events(run, "mirror-failed")
    assert (failed["step"], failed["waiting"]) == (20, [])
    assert "removed from the shared file system before it was copied" in str(failed["error"])
    assert remote.names() == [first]
    assert events(run, "pruned") == [{"name": second, "tier": "s3"}]


def test_what_an_earlier_mirror_began_and_nobody_will_finish_is_removed(run: RunDir, remote: Remote) -> None:
    gone, there = save(run, 0, 10), save(run, 0, 20)
    stranger = checkpoint_name(0, 30)  # not in the ledger: another run's on its way, for all we know
    for name in (gone, there, stranger):
        (remote.folder / name).mkdir(parents=True)
        (remote.folder / name / "a").write_bytes(b"begun")
    PosixStore(run.checkpoints).remove(gone)
    assert Mirror(run, remote, 0).poke()
    assert remote.names() == [there, stranger]
    assert whole(remote) == [there]


def test_the_mirror_keeps_what_the_owner_chose_until_the_attempt_has_one_of_its_own(
    run: RunDir, remote: Remote
) -> None:
    chosen = save(run, 0, 100)
    second = save(run, 0, 150, chosen)
    third = save(run, 0, 160, second)
    assert Mirror(run, remote, 0).poke()
    left_behind = save(run, 0, 200, third)
    ranks_prune(run, 0, 2)
    Ledger(run.ledger).append("accepted", step=100, name=chosen)
    run.attempt(1).path.mkdir()
    assert Mirror(run, remote, 1, keep=2).poke()  # the attempt is lost while its ranks restore
    assert remote.names() == [chosen, second, third]
    assert left_behind not in {event["name"] for event in events(run, "mirrored")}
    run.attempt(2).path.mkdir()
    parent = save(run, 2, 110, chosen)
    parent = save(run, 2, 210, parent)
    assert Mirror(run, remote, 2, keep=2).poke()
    assert remote.names() == [checkpoint_name(2, 110), checkpoint_name(2, 210)]


@pytest.mark.parametrize(("said", "left"), [(2, 2), (None, 4)])
def test_as_many_are_kept_on_s3_as_the_ranks_keep(run: RunDir, remote: Remote, said: int | None, left: int) -> None:
    mirror, parent = Mirror(run, remote, 0), None
    for step in (10, 20, 30, 40):
        parent = save(run, 0, step, parent, keep=said)
        assert mirror.poke()
    assert len(remote.names()) == left


def test_the_fence_is_looked_at_now_and_then(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pctool.checkpoint.fence.time.monotonic", lambda: now[0])
    watch = Watch(run, 0, every_s=5.0)
    watch.look()
    run.attempt(1).path.mkdir()
    watch.look()
    now[0] += 5.0
    with pytest.raises(FencedError):
        watch.look()
