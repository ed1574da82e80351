"""Two runs whose checkpoints come to lie under the same keys: neither takes, overwrites or removes the other's."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_standin import StandIn

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.foreign import ForeignCheckpointError
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.restore import Restorable, find_whole
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore, open_stores, store_key
from pctool.job.array import task_run_dir
from pctool.job.find import Found
from pctool.job.resume import accept
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger


def make_run(path: Path, *steps: int, attempt: int = 0) -> RunDir:
    """Make a run directory with a complete checkpoint at each step, as `pctool.train` saves them."""
    run = RunDir(path)
    run.attempt(attempt).path.mkdir(parents=True)
    for step in steps:
        save(run, step, attempt=attempt)
    return run


def save(run: RunDir, step: int, *, attempt: int = 0, parent: str | None = None) -> str:
    name, source = checkpoint_name(attempt, step), run.path / "source"
    source.write_bytes(f"{run.path} {name}".encode())
    entry = mf.describe_file(source)
    store = PosixStore(run.checkpoints)
    store.put(name, "data", source, entry)
    manifest = mf.Manifest(
        run=str(run.path), attempt=attempt, step=step, parent=parent, world_size=1, files={"data": entry}
    )
    store.publish(name, mf.encode(manifest))
    Ledger(run.ledger).append("committed", attempt=attempt, name=name, step=step)
    return name


def mirror(run: RunDir, url: str, attempt: int = 0, keep: int | None = None) -> Mirror:
    return Mirror(run, S3Store(url, store_key(run)), attempt, keep=keep)


def restored(run: RunDir, url: str) -> str | None:
    found: Restorable[None] | None = find_whole(run, url, Group(), Ledger(run.ledger), 9)
    return found.point.name if found else None


def on_s3(run: RunDir, url: str) -> dict[str, bytes | None]:
    store = S3Store(url, store_key(run))
    return {name: store.manifest(name) for name in store.names()}


@pytest.fixture
def ada(tmp_path: Path, url: str) -> RunDir:
    """Make ada's run, mirrored."""
    run = make_run(tmp_path / "ada" / "gpt", 100, 200)
    assert mirror(run, url).poke()
    return run


def test_the_tasks_of_two_arrays_have_keys_of_their_own(tmp_path: Path) -> None:
    first, second = (RunDir(task_run_dir(tmp_path / name, 0)) for name in ("lr", "wd"))
    assert [store_key(first), store_key(second)] == ["lr/task-0", "wd/task-0"]
    assert store_key(RunDir(tmp_path / "gpt")) == "gpt"
    assert store_key(RunDir(tmp_path / "task-of-mine")) == "task-of-mine"
    assert open_stores(first, "s3://bucket/prefix")[1].where == "s3://bucket/prefix/lr/task-0/checkpoints"


def test_a_fresh_run_takes_nothing_that_another_run_saved(ada: RunDir, tmp_path: Path, url: str, s3: StandIn) -> None:
    bob = make_run(tmp_path / "bob" / "gpt")
    for find in (find_resume, restored):
        with pytest.raises(ForeignCheckpointError, match="holds checkpoints of another run") as caught:
            find(bob, url)
        assert f"{url}/gpt/checkpoints" in caught.value.what
        assert str(ada.path) in caught.value.what
        assert f"pctool resume {bob.path} --from STEP" in str(caught.value)
    assert PosixStore(bob.checkpoints).names() == []


def test_a_damaged_one_is_not_made_good_from_another_runs_of_that_name(
    ada: RunDir, tmp_path: Path, url: str, s3: StandIn
) -> None:
    bob = make_run(tmp_path / "bob" / "gpt", 100, 200)
    (bob.checkpoints / checkpoint_name(0, 200) / mf.NAME).write_bytes(b"torn")
    for find in (find_resume, restored):
        with pytest.raises(ForeignCheckpointError):
            find(bob, url)


def test_a_file_system_that_was_made_anew_goes_on_from_s3(ada: RunDir, url: str, s3: StandIn) -> None:
    ada.path.rename(ada.path.with_name("old"))
    anew = make_run(ada.path)
    point = find_resume(anew, url)
    assert point is not None
    assert (point.step, point.tier) == (200, "s3")
    assert restored(anew, url) == checkpoint_name(0, 200)


def test_a_run_that_was_moved_knows_its_own(ada: RunDir, tmp_path: Path, url: str, s3: StandIn) -> None:
    moved = RunDir(tmp_path / "archive" / "gpt")
    moved.path.parent.mkdir()
    ada.path.rename(moved.path)
    PosixStore(moved.checkpoints).remove(checkpoint_name(0, 200))
    point = find_resume(moved, url)
    assert point is not None
    assert (point.step, point.tier) == (200, "s3")
    save(moved, 300)
    assert mirror(moved, url).poke()


def test_a_link_to_the_run_directory_is_no_other_run(ada: RunDir, tmp_path: Path, url: str, s3: StandIn) -> None:
    (tmp_path / "link").symlink_to(ada.path.parent)
    linked = RunDir(tmp_path / "link" / "gpt")
    for path in (ada.ledger, ada.checkpoints):
        path.rename(path.with_name(f"lost-{path.name}"))
    point = find_resume(linked, url)
    assert point is not None
    assert point.step == 200


@pytest.mark.parametrize("step", [200, 100])
def test_the_owner_may_go_on_from_them_knowingly(ada: RunDir, tmp_path: Path, url: str, s3: StandIn, step: int) -> None:
    ada.attempt(1).path.mkdir()
    save(ada, 250, attempt=1)
    assert mirror(ada, url, 1).poke()
    bob = make_run(tmp_path / "bob" / "gpt")
    accept(Found(job_id="", run=bob, job=None), step=step, store=url)
    point = find_resume(bob, url)
    assert point is not None
    assert point.step == step
    assert restored(bob, url) == checkpoint_name(0, step)


def test_the_owner_may_start_anew_beside_them(ada: RunDir, tmp_path: Path, url: str, s3: StandIn) -> None:
    bob = make_run(tmp_path / "bob" / "gpt")
    accept(Found(job_id="", run=bob, job=None), step=0, store=url)
    assert find_resume(bob, url) is None
    assert restored(bob, url) is None


def test_the_mirror_writes_nothing_beside_another_runs(ada: RunDir, tmp_path: Path, url: str, s3: StandIn) -> None:
    before = on_s3(ada, url)
    bob = make_run(tmp_path / "bob" / "gpt", 200, 300)
    s3.seen.clear()
    assert not mirror(bob, url, keep=2).poke()
    assert not [path for method, path in s3.seen if method in {"PUT", "POST"}]
    assert on_s3(bob, url) == before
    (failed,) = [event.fields for event in Ledger(bob.ledger).read() if event.event == "mirror-failed"]
    assert f"holds checkpoints of another run, {ada.path}" in str(failed["error"])


def test_what_was_taken_over_is_mirrored_beside_and_never_pruned(
    ada: RunDir, tmp_path: Path, url: str, s3: StandIn
) -> None:
    bob = make_run(tmp_path / "bob" / "gpt")
    accept(Found(job_id="", run=bob, job=None), step=200, store=url)
    parent = restored(bob, url)
    bob.attempt(1).path.mkdir()
    for step in (300, 400, 500):
        parent = save(bob, step, attempt=1, parent=parent)
    assert mirror(bob, url, 1, keep=2).poke()
    names = [checkpoint_name(*at) for at in ((0, 100), (0, 200), (1, 400), (1, 500))]
    assert sorted(on_s3(bob, url)) == names
