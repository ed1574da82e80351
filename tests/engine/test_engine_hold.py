"""One rank and its writer: memory that is another one, writers that hang, files that are there already."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_bench import Bench
from engine_gang import complete_steps, events
from engine_ranks import Known

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.writing import write_bytes, write_region


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.saver.close()


def test_the_state_of_these_tests_can_differ() -> None:
    model = Known(8)
    model.set(1)
    with torch.no_grad():
        model.parts[3].view(torch.int32)[5] += 1
    assert model.differing(1) == [3]


def test_a_state_that_grows_is_written_from_its_new_memory(bench: Bench) -> None:
    """The descriptor of the new memory has the number of the old one."""
    assert bench.save(1)
    before = bench.saver.engine._staging.fd
    with torch.no_grad():
        bench.model.parts.append(torch.nn.Parameter(torch.full((2_000_000,), 7.0)))
    bench.model.set(2)
    bench.saver.save(2, {})
    assert bench.saver.saved(2, within_s=30.0)
    assert bench.saver.engine._staging.fd == before
    folder = bench.run.checkpoints / "000000-00000002"
    manifest = mf.read_manifest(folder)
    assert manifest is not None
    assert not mf.file_faults(folder, manifest, list(manifest.files))


def test_memory_that_is_too_small_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with mmap.mmap(-1, 8192) as memory, memoryview(memory) as view, pytest.raises(OSError, match="8192 bytes"):
        write_region(view, 8193, tmp_path / "file")


def test_a_writer_that_does_not_answer_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer must not pass for the one to the next question."""
    bench.saver.engine.start()
    writer = bench.saver.engine._client._process
    assert writer is not None
    os.kill(writer.pid, signal.SIGSTOP)
    monkeypatch.setattr("pctool.checkpoint.client._ANSWER_S", 0.2)
    assert not bench.save(1)
    monkeypatch.undo()
    assert writer.wait(10.0) == -signal.SIGKILL
    assert bench.save(2)
    assert bench.save(3)
    assert [event.fields["step"] for event in events(bench.run, "commit-failed")] == [1]
    assert "did not answer in 0.2 s" in bench.why(1, "")
    bench.check(2, 3)


def test_a_writer_killed_between_saves_is_replaced(bench: Bench) -> None:
    assert bench.save(1)
    writer = bench.saver.engine._client._process
    assert writer is not None
    writer.kill()
    writer.wait()
    for step in (2, 3):
        bench.save(step)  # the first one may have been ordered before the end was seen
    assert set(complete_steps(bench.run).values()) >= {1, 3}
    bench.check(*complete_steps(bench.run).values())


def test_another_memory_behind_a_save_that_failed(bench: Bench) -> None:
    """The writer must have let go of the old memory, whatever it was at."""
    assert bench.save(1)
    (bench.run.checkpoints / "000000-00000002" / "__0_0.distcp").mkdir(parents=True)
    assert not bench.save(2)
    assert "__0_0.distcp" in bench.why(2, "")
    with torch.no_grad():
        bench.model.parts.append(torch.nn.Parameter(torch.full((2_000_000,), 7.0)))
    assert bench.save(3)
    assert [event.fields["step"] for event in events(bench.run, "commit-failed")] == [2]


def test_host_memory_that_cannot_be_had_fails_the_save_alone(bench: Bench) -> None:
    assert bench.save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with torch.no_grad():
        bench.model.parts.append(torch.nn.Parameter(torch.full((2_000_000,), 7.0)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # a memfd is a file, too
    try:
        assert not bench.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "rank 0: OSError: [Errno 27] File too large" in bench.why(2, "")
    assert set(complete_steps(bench.run).values()) == {1}
    assert bench.save(3)
    assert set(complete_steps(bench.run).values()) == {1, 3}


def test_who_still_writes_to_an_earlier_file_of_that_name_does_no_harm(tmp_path: Path) -> None:
    with mmap.mmap(-1, 4096) as memory, memoryview(memory) as view:
        for path, write in ((tmp_path / "a", lambda path: write_region(view, 100, path)), (tmp_path / "b", _small)):
            path.write_bytes(b"x" * 9000)
            with path.open("r+b") as stale:
                write(path)
                stale.write(b"late")
            assert path.read_bytes() == bytes(100)


def _small(path: Path) -> mf.FileEntry:
    return write_bytes(bytes(100), path)
