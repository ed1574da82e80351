"""A file system that is full, read-only or hangs: that save fails and says why, the older checkpoint stands."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_bench import Bench
from engine_gang import complete_steps, events, wait_for

from pctool.checkpoint import engine as engine_module
from pctool.checkpoint.stores import PosixStore

pytestmark = pytest.mark.root

PAGE = 4096
STAGES = {"distcp", "rng-00000", ".metadata", "MANIFEST"}
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW of linux/fs.h

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return what mounts a small file system and returns its folder; skips where that is not allowed."""
    folders: list[Path] = []

    def do(kind: str, options: str = "size=6m") -> Path:
        folder = tmp_path / f"{kind}-{len(folders)}"
        folder.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if kind == "ext4":
            image = tmp_path / "image"
            with image.open("wb") as file:
                file.truncate(32 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
            argv = ["mount", "-o", "loop", str(image), str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield do
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, room: int) -> Path:
    """Fill a file system up to `room` bytes, in whole pages."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        os.posix_fallocate(file.fileno(), 0, max(free - room, 1))
    return filler


def test_a_disk_that_is_full_at_any_stage(mount: Mount, capfd: pytest.CaptureFixture[str]) -> None:
    """Room for ever one page more: so each file of a save, and the ledger, is once the one that does not fit."""
    folder = mount("tmpfs")
    bench = Bench(folder)
    assert bench.save(1)
    whole = bench.run.checkpoints / "000000-00000001"
    needed = sum(-(-path.stat().st_size // PAGE) for path in whole.iterdir())
    data = next(whole.glob("*.distcp")).stat().st_size // PAGE
    steps, stages, unwritten, entered = [1], set(), set(), 0
    rooms = [0, data // 2, *range(data - 1, needed + 5)]
    for step, room in enumerate(rooms, start=2):
        with bench.run.ledger.open("a") as ledger:  # its last page must have no room
            ledger.write(" " * (-(ledger.tell() + 1) % PAGE) + "\n")
        filler = fill(folder, room * PAGE)
        done = bench.save(step)
        said = capfd.readouterr().err
        why = bench.why(step, said)
        filler.unlink()
        if done:
            steps.append(step)
            told = {event.fields["step"] for event in events(bench.run, "committed")}
            unwritten |= {step} - told
            assert (step in told) != (f"{bench.run.ledger} cannot be written" in said)
        else:
            failed = [event.fields["step"] for event in events(bench.run, "commit-failed")]
            assert (step in failed) != (f"{bench.run.ledger} cannot be written" in said)
            entered += step in failed
            assert "No space left on device" in why
            stages |= {file for file in STAGES if file in why and f"{step:08d}/" in why}
            assert not (bench.run.checkpoints / f"000000-{step:08d}").exists(), "it takes the room of the next"
        bench.check(*steps)
        for old in steps[1:-1]:
            PosixStore(bench.run.checkpoints).remove(f"000000-{old:08d}")
            steps.remove(old)
    assert stages == STAGES
    assert entered, "what a save leaves must make room for the ledger"
    assert unwritten, "the ledger was never what did not fit"
    assert bench.save(99)
    bench.check(*steps, 99)
    bench.saver.close()


def test_inodes_that_are_used_up_at_any_stage(mount: Mount, capfd: pytest.CaptureFixture[str]) -> None:
    folder = mount("tmpfs", "size=20m,nr_inodes=40")
    bench = Bench(folder)
    assert bench.save(1)
    failed = 0
    for step, left in enumerate(range(6), start=2):
        fillers = [folder / f"filler-{number}" for number in range(os.statvfs(folder).f_favail - left)]
        for filler in fillers:
            filler.touch()
        done = bench.save(step)
        why = bench.why(step, capfd.readouterr().err)
        for filler in fillers:
            filler.unlink()
        if done:
            break
        failed += 1
        assert "No space left on device" in why
        assert f"000000-{step:08d}" in why
        bench.check(1)
    assert failed == 5  # the folder, three files, MANIFEST
    bench.check(1, step)
    bench.saver.close()


def test_a_full_ext4_that_takes_direct_writes(mount: Mount, capfd: pytest.CaptureFixture[str]) -> None:
    folder = mount("ext4")
    bench = Bench(folder)
    assert bench.save(1)
    filler = fill(folder, 1 << 19)
    assert not bench.save(2)
    assert "000000-00000002/__0_0.distcp" in bench.why(2, capfd.readouterr().err)
    bench.check(1)
    filler.unlink()
    assert bench.save(3)
    bench.check(1, 3)
    bench.saver.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_that_turns_read_only(kind: str, mount: Mount, capfd: pytest.CaptureFixture[str]) -> None:
    folder = mount(kind)
    bench = Bench(folder)
    assert bench.save(1)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    assert not bench.save(2)
    said = capfd.readouterr().err
    assert "step 2 could not be saved" in said
    assert f"Read-only file system: '{bench.run.checkpoints}/000000-00000002'" in said
    bench.check(1)
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    assert bench.save(3)
    bench.check(1, 3)
    bench.saver.close()


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """Freeze a file system: who writes there waits, and cannot even be killed, as on a server that is gone."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, THAW, 0)
    finally:
        os.close(fd)


def test_a_file_system_that_hangs(
    mount: Mount, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PATIENCE_S", 0.1)
    folder = mount("ext4")
    bench = Bench(folder)
    assert bench.save(1)
    with hanging(folder):
        began = time.monotonic()
        bench.model.set(2)
        bench.saver.save(2, {})  # the training goes on
        assert not bench.saver.saved(2, within_s=0.5)
        assert time.monotonic() - began < 10.0
        said = capfd.readouterr().err
        assert "still waiting for the save of step 2 (for 0 s): the files of rank 0 are not written yet" in said
        assert said.count("still waiting for the save of step 2") <= 3  # after 0.1, 0.2, 0.4 s
        bench.check(1)
        waiting = threading.Thread(target=bench.saver.save, args=(3, {}))
        waiting.start()  # with the policy `wait` the next save waits
        waiting.join(0.3)
        assert waiting.is_alive()
        assert "still waiting for the save of step 2" in capfd.readouterr().err
    waiting.join()
    assert bench.saver.saved(3)
    assert set(complete_steps(bench.run).values()) == {1, 2, 3}
    bench.saver.close()


def test_saves_that_are_due_while_the_file_system_hangs_are_skipped(mount: Mount) -> None:
    folder = mount("ext4")
    bench = Bench(folder, busy="skip")
    assert bench.save(1)
    with hanging(folder):
        for step in (2, 3, 4):
            bench.model.set(step)
            bench.saver.save(step, {})  # of these none waits, or the test would never end
        bench.check(1)
    assert bench.saver.saved(2)
    wait_for("the ledger", lambda: len(events(bench.run, "save-skipped")) == 2)
    assert [event.fields["step"] for event in events(bench.run, "save-skipped")] == [3, 4]
    bench.check(1, 2)
    assert bench.save(5)
    bench.check(1, 2, 5)
    bench.saver.close()


def test_a_final_save_behind_one_that_hangs_ends_in_time(mount: Mount) -> None:
    folder = mount("ext4")
    bench = Bench(folder)
    assert bench.save(1)
    writer = bench.saver.engine._client._process
    assert writer is not None
    bench.model.set(2)
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        bench.saver.save(2, {})
        began = time.monotonic()
        assert not bench.saver.save_and_leave(3, {}, within_s=0.3)
        bench.saver.close()
        assert time.monotonic() - began < 10.0
        bench.check(1)
        assert [event.fields["step"] for event in events(bench.run, "commit-failed")] == [3]
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    wait_for("what was copied", lambda: len(complete_steps(bench.run)) == 2)  # the writer ends what it was ordered
    bench.check(1, 2)
