"""One suite over both tiers of checkpoints, and what only S3 can do wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_standin import Fault, StandIn

from pctool.aws.s3 import S3, S3DownError, S3NotThereError, S3RefusedError, S3SlowError
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import find_resume, look
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore, Store
from pctool.errors import FencedError, IncompleteError, UsageError
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

NAME = checkpoint_name(0, 50)


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "posix":
        return PosixStore(tmp_path / "run" / "checkpoints")
    return S3Store(request.getfixturevalue("url"), "run")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write a file and return its path."""

    def write(data: bytes = b"some bytes", name: str = "data") -> Path:
        (tmp_path / "source").mkdir(exist_ok=True)
        path = tmp_path / "source" / name
        path.write_bytes(data)
        return path

    return write


def manifest_of(entries: dict[str, mf.FileEntry], **fields: object) -> bytes:
    record = {"run": "run", "attempt": 0, "step": 50, "parent": None, "world_size": 1, **fields}
    return mf.encode(mf.Manifest(**record, files=entries))  # type: ignore[arg-type]


def put(store: Store, source: Path, name: str = NAME) -> bytes:
    entry = mf.describe_file(source)
    store.put(name, "data", source, entry)
    data = manifest_of({"data": entry}, step=int(name.partition("-")[2]))
    store.publish(name, data)
    return data


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert store.names() == []
    assert store.manifest(NAME) is None
    assert store.sizes(NAME) == {}


def test_a_published_checkpoint_is_complete_and_comes_back(
    store: Store, make: Callable[..., Path], tmp_path: Path
) -> None:
    data = put(store, make(b"12345"))
    assert store.names() == [NAME]
    assert store.manifest(NAME) == data
    assert store.sizes(NAME)["data"] == 5
    assert look(store, NAME).ok
    store.fetch(NAME, "data", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"12345"
    assert not (tmp_path / "back.part").exists()


def test_without_its_manifest_it_is_there_but_not_complete(store: Store, make: Callable[..., Path]) -> None:
    source = make()
    store.put(NAME, "data", source, mf.describe_file(source))
    assert store.names() == [NAME]
    assert not look(store, NAME).ok


def test_names_come_oldest_first(store: Store, make: Callable[..., Path]) -> None:
    names = [checkpoint_name(*at) for at in [(1, 10), (0, 200), (0, 30), (10, 5)]]
    for name in names:
        put(store, make(), name)
    assert store.names() == [checkpoint_name(*at) for at in [(0, 30), (0, 200), (1, 10), (10, 5)]]


def test_publishing_the_same_again_is_fine_and_another_is_fenced(store: Store, make: Callable[..., Path]) -> None:
    data = put(store, make())
    store.publish(NAME, data)
    with pytest.raises(FencedError):
        store.publish(NAME, manifest_of({}, step=51))
    assert store.manifest(NAME) == data


def test_a_source_that_is_not_what_its_entry_says_is_refused(store: Store, make: Callable[..., Path]) -> None:
    source = make(b"some bytes")
    entry = mf.describe_file(source)
    source.write_bytes(b"some bytez")
    with pytest.raises(IncompleteError, match="CRC64-NVME"):
        store.put(NAME, "data", source, entry)
    assert store.sizes(NAME) == {}


def test_fetching_what_is_not_there_is_incomplete(store: Store, make: Callable[..., Path], tmp_path: Path) -> None:
    put(store, make())
    with pytest.raises(IncompleteError):
        store.fetch(NAME, "no-such-file", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_removing_takes_all_of_it_and_twice_is_fine(store: Store, make: Callable[..., Path]) -> None:
    put(store, make())
    other = checkpoint_name(0, 100)
    put(store, make(), other)
    store.remove(NAME)
    store.remove(NAME)
    assert store.names() == [other]
    assert look(store, other).ok


def test_a_lost_answer_to_a_conditional_put_is_not_a_fence(url: str, s3: StandIn, make: Callable[..., Path]) -> None:
    store = S3Store(url, "run")
    source = make()
    entry = mf.describe_file(source)
    store.put(NAME, "data", source, entry)
    s3.faults.append(Fault("lost-answer", "PUT", "MANIFEST", times=1))
    store.publish(NAME, manifest_of({"data": entry}))
    assert [method for method, path in s3.seen if "MANIFEST" in path] == ["PUT", "PUT", "GET"]
    assert look(store, NAME).ok


def test_what_is_refused_or_not_there_is_not_asked_for_again(
    url: str, s3: StandIn, make: Callable[..., Path], tmp_path: Path
) -> None:
    store = S3Store(url, "run")
    put(store, make())
    s3.faults.append(Fault("refused", "GET", "/data"))
    with pytest.raises(S3RefusedError):
        store.fetch(NAME, "data", tmp_path / "back")
    with pytest.raises(IncompleteError):
        store.fetch(NAME, "nothing", tmp_path / "back")
    assert s3.asked("GET", "/data") == s3.asked("HEAD", "/nothing") == 1


def test_a_conflict_is_retried_and_bounded(url: str, s3: StandIn) -> None:
    s3.faults.append(Fault("conflict", "PUT", times=3))
    assert S3(url).put_new("k", b"1")
    s3.faults.append(Fault("conflict", "PUT"))
    with pytest.raises(S3SlowError):
        S3(url).put_new("other", b"1")


@pytest.mark.parametrize(
    ("kind", "error"),
    [("refused", S3RefusedError), ("throttled", S3SlowError), ("broken", S3DownError), ("hang", S3SlowError)],
)
def test_trouble_has_a_name_and_is_never_absence(url: str, s3: StandIn, kind: str, error: type[Exception]) -> None:
    s3.faults.append(Fault(kind))
    store = S3Store(url, "run")
    for ask in (store.names, lambda: store.manifest(NAME), lambda: store.sizes(NAME)):
        with pytest.raises(error):
            ask()


def test_a_closed_port_is_down(s3: StandIn, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(S3DownError):
        S3Store(url, "run").names()


def test_a_missing_bucket_says_so(s3: StandIn) -> None:
    with pytest.raises(S3NotThereError, match="bucket nowhere-at-all"):
        S3Store("s3://nowhere-at-all/x", "run").names()


@pytest.mark.parametrize("bad", ["bucket/x", "http://b/x", "s3://", "s3:///x"])
def test_what_is_no_s3_address_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        S3Store(bad, "run")


def saved_run(tmp_path: Path, steps: tuple[int, ...] = (50, 100)) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        save(run, step)
    return run


def save(run: RunDir, step: int) -> str:
    name = checkpoint_name(0, step)
    source = run.path / "data"
    source.write_bytes(name.encode() * 10)
    store = PosixStore(run.checkpoints)
    entry = mf.describe_file(source)
    store.put(name, "data", source, entry)
    store.publish(name, manifest_of({"data": entry}, step=step))
    return name


def add(run: RunDir, step: int) -> None:
    """Add a checkpoint whose parent is the one ten steps before."""
    store, source = PosixStore(run.checkpoints), run.path / "data"
    source.write_bytes(b"x")
    entry = mf.describe_file(source)
    store.put(checkpoint_name(0, step), "data", source, entry)
    parent = checkpoint_name(0, step - 10) if step > 10 else None
    store.publish(checkpoint_name(0, step), manifest_of({"data": entry}, step=step, parent=parent))


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [event.fields for event in Ledger(run.ledger).read() if event.event == kind]


def test_the_mirror_copies_the_newest_first_and_only_once(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    mirror = Mirror(run, S3Store(url, "run"), 0)
    assert mirror.poke()
    assert [event["step"] for event in events(run, "mirrored")] == [100, 50]
    puts = sum(method == "PUT" for method, _ in s3.seen)
    assert mirror.poke()
    assert Mirror(run, S3Store(url, "run"), 0).poke()  # a new attempt's mirror
    assert sum(method == "PUT" for method, _ in s3.seen) == puts == 4


def test_the_mirror_names_what_s3_refuses_and_tries_again_after_a_while(url: str, s3: StandIn, tmp_path: Path) -> None:
    run, now = saved_run(tmp_path), [1000.0]
    mirror = Mirror(run, S3Store(url, "run"), 0, clock=lambda: now[0])
    s3.faults.append(Fault("refused", "PUT", "MANIFEST"))
    assert not mirror.poke()
    failed = events(run, "mirror-failed")
    assert [event["step"] for event in failed] == [100]
    assert "S3 refused" in str(failed[0]["error"])
    s3.faults.clear()
    asked = len(s3.seen)
    assert not mirror.poke()  # too early: nothing is asked of S3
    assert len(s3.seen) == asked
    now[0] += 5.0
    assert mirror.poke()
    assert [event["step"] for event in events(run, "mirrored")] == [100, 50]


def test_an_s3_that_refuses_everything_leaves_all_of_them_named(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    s3.faults.append(Fault("refused"))
    assert not Mirror(run, S3Store(url, "run"), 0).poke()
    (failed,) = events(run, "mirror-failed")
    assert (failed["step"], failed["waiting"]) == (100, [checkpoint_name(0, 50)])


def test_a_ledger_that_cannot_be_written_does_not_end_the_mirror(url: str, s3: StandIn, tmp_path: Path) -> None:
    run, now = saved_run(tmp_path), [1000.0]
    mirror = Mirror(run, S3Store(url, "run"), 0, clock=lambda: now[0])
    run.ledger.unlink(missing_ok=True)
    run.ledger.symlink_to(tmp_path / "nowhere" / "ledger")  # stands for a full disk
    assert not mirror.poke()  # the copy is there, and not written down
    run.ledger.unlink()
    now[0] += 5.0
    assert mirror.poke()
    assert [event["step"] for event in events(run, "mirrored")] == [50]


def test_what_s3_does_not_let_us_remove_keeps_back_no_copy(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path, ())
    mirror = Mirror(run, S3Store(url, "run"), 0, keep=2)
    s3.faults.append(Fault("refused", "POST", "delete"))
    for step in (10, 20, 30, 40):
        add(run, step)
        assert mirror.poke()
    assert len(S3Store(url, "run").names()) == 4
    s3.faults.clear()
    assert mirror.poke()
    assert [event["name"] for event in events(run, "pruned")] == [checkpoint_name(0, 10), checkpoint_name(0, 20)]


def test_the_mirror_of_an_older_attempt_is_fenced(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    run.attempt(1).path.mkdir()
    with pytest.raises(FencedError):
        Mirror(run, S3Store(url, "run"), 0).poke()
    assert S3Store(url, "run").names() == []


def test_a_damaged_one_is_named_and_does_not_keep_back_the_newer(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    data = run.checkpoints / checkpoint_name(0, 50) / "data"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert Mirror(run, S3Store(url, "run"), 0).poke()
    assert [event["name"] for event in events(run, "rejected")] == ["000000-00000050"]
    assert [event["step"] for event in events(run, "mirrored")] == [100]


def test_the_mirror_keeps_as_many_as_it_is_told(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path, ())
    mirror = Mirror(run, S3Store(url, "run"), 0, keep=2)
    for step in (10, 20, 30):
        add(run, step)
    assert mirror.poke()
    assert S3Store(url, "run").names() == [checkpoint_name(0, 20), checkpoint_name(0, 30)]
    assert events(run, "pruned") == [{"name": checkpoint_name(0, 10), "tier": "s3"}]


def test_a_run_resumes_from_s3_when_the_run_directory_lost_its_checkpoints(
    url: str, s3: StandIn, tmp_path: Path
) -> None:
    run = saved_run(tmp_path)
    Ledger(run.ledger).append("committed", attempt=0, name=checkpoint_name(0, 100), step=100)
    assert Mirror(run, S3Store(url, "run"), 0).poke()
    for name in PosixStore(run.checkpoints).names():
        PosixStore(run.checkpoints).remove(name)
    point = find_resume(run, url)
    assert point is not None
    assert (point.step, point.tier) == (100, "s3")


def test_a_store_that_refuses_is_never_an_empty_one(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path, ())
    assert find_resume(run, url) is None
    s3.faults.append(Fault("refused"))
    with pytest.raises(S3RefusedError):
        find_resume(run, url)


def start_mirror(run: RunDir, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pctool.checkpoint.mirror", str(run.path), url, "--attempt", "0"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_mirror_process_follows_its_orders(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path, (50,))
    with start_mirror(run, url) as process:
        assert process.stdin is not None
        process.stdin.write("mirror\n")
        process.stdin.flush()
        save(run, 100)
        _, said = process.communicate("mirror\nfinish 0\n", timeout=60)
    assert process.returncode == 0, said
    # in either order: the second may be there before the first copy begins
    assert {event["step"] for event in events(run, "mirrored")} == {50, 100}


def test_the_mirror_process_begins_by_itself_with_what_is_left(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    with start_mirror(run, url) as process:
        end = time.monotonic() + 60
        while len(events(run, "mirrored")) < 2 and time.monotonic() < end:
            time.sleep(0.1)  # the ledger is all it tells, and no order was given
        mirrored = [event["step"] for event in events(run, "mirrored")]
        process.communicate(timeout=60)
    assert mirrored == [100, 50]


def test_the_mirror_process_ends_with_1_when_the_deadline_comes_first(url: str, s3: StandIn, tmp_path: Path) -> None:
    run = saved_run(tmp_path, (50,))
    s3.faults.append(Fault("refused"))
    with start_mirror(run, url) as process:
        _, said = process.communicate("finish 1\n", timeout=60)
    assert process.returncode == 1
    assert "not mirrored" in said
    assert len(events(run, "mirror-failed")) == 2  # at its start, and once more when told to finish
    assert json.loads(run.ledger.read_text().splitlines()[-1])["event"] == "mirror-failed"
