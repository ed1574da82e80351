"""The mirror on S3: it goes on where one was killed, leaves nothing behind, keeps to its share, gets over trouble."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_multipart import parse
from s3_standin import Fault, StandIn

from pctool.aws.s3 import S3
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import look
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import PosixStore
from pctool.errors import FencedError
from pctool.run import env
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Ledger

PART = 1 << 14
NAME = checkpoint_name(0, 50)
PROCESS = (
    f"import sys; from pctool.aws import s3; s3.PART_BYTES = {PART}; s3.READ_TIMEOUT_S = 5.0; "
    "from pctool.checkpoint.mirror import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.attempt(0).path.mkdir(parents=True)
    return run


@pytest.fixture
def store(url: str) -> S3Store:
    return S3Store(url, "run", s3=S3(url, part_bytes=PART))


def save(run: RunDir, step: int, sizes: tuple[int, ...] = (4 * PART + 5, 10), *, told: bool = True) -> str:
    name, source, entries = checkpoint_name(0, step), run.path / "source", {}
    local = PosixStore(run.checkpoints)
    for file, size in zip("abcdefgh", sizes, strict=False):
        source.write_bytes(os.urandom(size))
        entries[file] = mf.describe_file(source)
        local.put(name, file, source, entries[file])
    manifest = mf.Manifest(run=str(run.path), attempt=0, step=step, parent=None, world_size=1, files=entries)
    local.publish(name, mf.encode(manifest))
    if told:
        Ledger(run.ledger).append("committed", attempt=0, name=name, step=step)
    return name


def mirror_of(run: RunDir, store: S3Store, attempt: int = 0, clock: Callable[[], float] = time.time) -> Mirror:
    return Mirror(run, store, attempt, uploads=store, clock=clock)


def begin(store: S3Store, name: str, file: str = "a", *, root: str = "") -> None:
    """Begin an upload and send one part of it."""
    door = store.s3.door(f"{root or store.root}/{name}/{file}")
    began = door.ask("create_multipart_upload", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
    door.ask("upload_part", UploadId=began["UploadId"], PartNumber=1, Body=b"x", ChecksumAlgorithm="CRC64NVME")


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [event.fields for event in Ledger(run.ledger).read() if event.event == kind]


def start(run: RunDir, url: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(run.path), url, "--attempt", "0"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def await_parts(s3: StandIn, least: int) -> None:
    end = time.monotonic() + 60
    while sum(len(upload.parts) for upload in s3.books.open.values()) < least:
        assert time.monotonic() < end
        time.sleep(0.02)  # the mirror tells nobody of its parts


def test_a_killed_mirror_is_gone_on_from(run: RunDir, url: str, s3: StandIn, store: S3Store) -> None:
    """Two parts are let pass, the others have to wait for minutes."""
    save(run, 50)
    with start(run, url, PCTOOL_MIRROR_MBPS=str(PART / 1e6 / 2)) as process:
        await_parts(s3, 2)
        process.kill()
        process.communicate()
    (upload,) = s3.books.open.values()
    there = set(upload.parts)
    s3.seen.clear()
    assert mirror_of(run, store).poke()
    sent = [int(parse(method, path).query["partNumber"]) for method, path in s3.seen if "partNumber" in path]
    assert sorted(sent) == sorted({1, 2, 3, 4, 5} - there)
    assert 2 <= len(there) < 5
    assert look(store, NAME).ok
    assert s3.books.open == {}


def test_a_stop_lifts_the_share(run: RunDir, url: str, s3: StandIn, store: S3Store) -> None:
    """At this rate the checkpoint would take a quarter of an hour."""
    save(run, 50)
    with start(run, url, PCTOOL_MIRROR_MBPS=str(PART / 1e6 / 200)) as process:
        await_parts(s3, 1)
        _, said = process.communicate("finish 0\n", timeout=60)
    assert process.returncode == 0, said
    assert look(store, NAME).ok


def test_the_process_that_copies_nothing(run: RunDir, url: str, s3: StandIn) -> None:
    save(run, 50)
    with start(run, url, **{env.MIRROR: "dra"}) as process:
        _, said = process.communicate("finish 1\n", timeout=60)
    assert process.returncode == 1
    assert "FSx has not exported 2 of 2 yet: a: missing, b: missing" in said
    assert {method for method, _ in s3.seen} == {"GET"}
    assert [event["name"] for event in events(run, "mirror-failed")] == [NAME, NAME]  # at its start, and at the end


@pytest.mark.parametrize(("name", "value"), [(env.MIRROR, "rsync"), (env.MIRROR_MBPS, "fast"), (env.MIRROR_MBPS, "0")])
def test_settings_that_mean_nothing_are_said(run: RunDir, url: str, s3: StandIn, name: str, value: str) -> None:
    with start(run, url, **{name: value}) as process:
        _, said = process.communicate("finish 0\n", timeout=60)
    assert process.returncode == 1
    assert f"{name} is '{value}'" in said
    assert "Traceback" not in said


def test_what_no_checkpoint_needs_is_aborted_and_nothing_else(run: RunDir, s3: StandIn, store: S3Store) -> None:
    mirrored, gone = save(run, 50), save(run, 60)
    unknown = checkpoint_name(7, 70)  # not in the ledger: another run's on its way, for all we know
    PosixStore(run.checkpoints).remove(gone)
    for name in (mirrored, gone, unknown):
        begin(store, name, "z")
    begin(store, mirrored, root="run2/checkpoints")
    assert mirror_of(run, store).poke()
    left = sorted(upload.key.split("/", 2)[2] for upload in s3.books.open.values())
    assert left == [f"run/checkpoints/{unknown}/z", f"run2/checkpoints/{mirrored}/a"]


def test_an_upload_that_another_program_began_is_not_gone_on_with(run: RunDir, s3: StandIn, store: S3Store) -> None:
    """S3 takes no part whose checksum is not of the kind that the upload was begun with."""
    save(run, 50)
    store.s3.door(store.key(NAME, "a")).ask("create_multipart_upload", ChecksumAlgorithm="CRC32")
    assert mirror_of(run, store).poke()
    assert look(store, NAME).ok
    assert s3.books.open == {}


def test_nothing_is_aborted_beside_another_runs(run: RunDir, s3: StandIn, store: S3Store) -> None:
    name = save(run, 50)
    manifest = mf.Manifest(run="/fsx/bob/run", attempt=0, step=40, parent=None, world_size=1, files={})
    store.publish(checkpoint_name(0, 40), mf.encode(manifest))
    PosixStore(run.checkpoints).remove(name)
    begin(store, name)
    mirror_of(run, store).poke()
    assert len(s3.books.open) == 1


def test_a_fenced_mirror_stops_and_leaves_everything_to_the_newer_one(
    run: RunDir, s3: StandIn, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 50, (2 * PART, 2 * PART, 2 * PART))
    save(run, 60, (10,))
    monkeypatch.setattr("pctool.checkpoint.deliver.FILES_AT_ONCE", 1)
    real = store.put

    def put(name: str, file: str, source: Path, entry: mf.FileEntry) -> None:
        real(name, file, source, entry)
        if name == NAME and not run.attempt(1).path.exists():
            begin(store, NAME, "b")
            run.attempt(1).path.mkdir()

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(FencedError):
        mirror_of(run, store).poke()
    assert store.sizes(NAME) == {"a": 2 * PART}
    assert len(s3.books.open) == 1
    assert s3.asked("DELETE", "") == s3.asked("POST", "?delete") == 0


def test_what_is_damaged_at_its_source_is_named_and_its_upload_aborted(
    run: RunDir, s3: StandIn, store: S3Store
) -> None:
    save(run, 40)
    save(run, 50, told=False)
    file = run.checkpoints / NAME / "a"
    data = bytearray(file.read_bytes())
    data[PART + 1] ^= 1
    file.write_bytes(data)
    assert mirror_of(run, store).poke()
    (rejected,) = events(run, "rejected")
    assert (rejected["name"], rejected["tier"]) == (NAME, "posix")
    assert "a: CRC64-NVME" in str(rejected["why"])
    assert store.manifest(NAME) is None
    assert s3.books.open == {}
    assert [event["step"] for event in events(run, "mirrored")] == [40]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("throttled", "PUT"),
        Fault("broken", "PUT", "partNumber=2"),
        Fault("failed-after", "PUT", "partNumber=3"),
        Fault("reset", "PUT", "/a"),
        Fault("lose", "PUT", "/b"),
        Fault("lose", "PUT", "partNumber=5"),
        Fault("skewed"),
        Fault("refused", "GET", "uploads"),
        Fault("conflict", "POST", "uploadId"),
        Fault("conflict", "PUT", "MANIFEST"),
        Fault("conflict", "GET"),
        Fault("spoil", "PUT", "partNumber=1"),
        Fault("spoil", "PUT", "MANIFEST"),
        Fault("gone", "PUT", "partNumber=4"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.method}-{fault.part}".replace("/", ""),
)
def test_trouble_is_named_publishes_nothing_and_passes(run: RunDir, s3: StandIn, store: S3Store, fault: Fault) -> None:
    save(run, 50)
    now = [1000.0]
    mirror = mirror_of(run, store, clock=lambda: now[0])
    s3.faults.append(fault)
    assert not mirror.poke()
    s3.faults.clear()
    (failed,) = events(run, "mirror-failed")
    assert (failed["name"], failed["waiting"]) == (NAME, [])
    assert store.manifest(NAME) is None
    now[0] += 5.0
    assert mirror.poke()
    assert look(store, NAME).ok
    manifest = mf.decode(store.manifest(NAME) or b"")
    kept = {file: store.stored(NAME, file) for file in manifest.files}
    assert {file: mf.FileEntry(size=one.size, crc64nvme=one.crc64nvme or "") for file, one in kept.items() if one} == (
        manifest.files
    )
    assert s3.books.open == {}


def test_credentials_that_expire_meanwhile_are_waited_for(
    run: RunDir, url: str, s3: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = tmp_path / "credentials", [1000.0]
    lines = "[default]\naws_access_key_id={}\naws_secret_access_key=x\n"
    file.write_text(lines.format("OLD"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = S3Store(url, "run", s3=S3(url, part_bytes=PART))
    mirror = mirror_of(run, store, clock=lambda: now[0])
    save(run, 40)
    assert mirror.poke()
    save(run, 50)
    s3.expired.add("OLD")
    assert not mirror.poke()
    assert "the credentials have expired" in str(events(run, "mirror-failed")[0]["error"])
    file.write_text(lines.format("NEW"))
    now[0] += 5.0
    assert mirror.poke()
    assert look(store, NAME).ok


def test_a_manifest_that_another_wrote_fences_and_is_not_written_over(
    run: RunDir, s3: StandIn, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between our look and our write, so only the condition of the write can tell."""
    save(run, 50)
    other = mf.encode(mf.Manifest(run="/fsx/bob/run", attempt=0, step=50, parent=None, world_size=1, files={}))
    real = store.publish

    def publish(name: str, data: bytes) -> None:
        real(name, other)
        real(name, data)

    monkeypatch.setattr(store, "publish", publish)
    with pytest.raises(FencedError, match="another attempt has published"):
        mirror_of(run, store).poke()
    assert store.manifest(NAME) == other
    assert events(run, "mirrored") == []
