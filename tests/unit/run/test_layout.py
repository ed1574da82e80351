"""Names and places in a run directory, and files that are never seen half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.run.layout import RunDir, attempt_name, checkpoint_name, parse_checkpoint_name, write_atomic


@given(st.integers(0, 999_999), st.integers(0, 10**10))
def test_checkpoint_names_read_back(attempt: int, step: int) -> None:
    assert parse_checkpoint_name(checkpoint_name(attempt, step)) == (attempt, step)


@given(*[st.tuples(st.integers(0, 999_999), st.integers(0, 99_999_999))] * 2)
def test_checkpoint_names_sort_as_their_numbers(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (checkpoint_name(*one) < checkpoint_name(*other)) == (one < other)


@pytest.mark.parametrize(
    "name", ["", "000001", "000001-", "1-00000001", "000001-1", "000001-00000001.tmp", "a-b", ".000001-00000001"]
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_places_are_those_of_the_contract(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = run.attempt(3)
    places = [run.job_toml, run.ledger, attempt.claim, attempt.node_exit("n-1"), attempt.node_start("n-1")]
    places += [attempt.stop, attempt.heartbeat, run.logs(3), run.checkpoints]
    assert [str(place.relative_to(tmp_path)) for place in places] == [
        "job.toml",
        "ledger.jsonl",
        "attempts/000003/claim.json",
        "attempts/000003/nodes/n-1.exit",
        "attempts/000003/nodes/n-1.json",
        "attempts/000003/stop",
        "attempts/000003/heartbeat.json",
        "logs/000003",
        "checkpoints",
    ]


def test_attempts_are_counted_from_their_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.attempt_numbers() == []
    for name in (attempt_name(10), attempt_name(9), "tmp", ".000011.tmp", "0000012"):
        (run.attempts / name).mkdir(parents=True)
    assert run.attempt_numbers() == [9, 10]


def test_attempts_that_cannot_be_listed_are_an_error_and_never_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempts.write_text("not a folder")
    with pytest.raises(NotADirectoryError):
        run.attempt_numbers()


def test_write_atomic_replaces_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["claim.json"]


def test_write_atomic_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write_atomic(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_call_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space") as error:
            write_atomic(path, b"new")
        assert error.value.filename == str(path)  # a write or an fsync does not know it
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_bytes_are_durable_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        return call

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, watched(name))
    write_atomic(tmp_path / "file", b"data")
    assert calls == ["write", "fsync", "rename", "fsync"]  # the last one is the folder's


def test_a_killed_writer_never_leaves_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    program = """
import itertools, sys
from pathlib import Path
from pctool.run.layout import write_atomic
for n in itertools.count():
    write_atomic(Path(sys.argv[1]), b"%08d" % n * 100_000)
"""
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    try:
        seen: set[bytes] = set()
        while len(seen) < 20 and writer.poll() is None:
            if path.exists():
                data = path.read_bytes()
                assert data == data[:8] * 100_000
                seen.add(data[:8])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) == 20
    data = path.read_bytes()
    assert data == data[:8] * 100_000
