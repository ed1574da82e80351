"""What a commit costs with many ranks, counted: calls to the file system, and all calls, for more and more files."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint import coordinator
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.coordinator import Order, publish
from pctool.errors import FencedError, IncompleteError
from pctool.run.layout import RunDir, checkpoint_name

EMPTY = mf.FileEntry(size=0, crc64nvme=mf.crc64nvme([]))
NAME = checkpoint_name(0, 10)
ORDER = Order(name=NAME, step=10, began=0.0, fields={"parent": None, "world_size": 2})


def written(root: Path, count: int) -> tuple[RunDir, dict[str, mf.FileEntry]]:
    """Return a run and what its ranks wrote of a checkpoint."""
    run, files = RunDir(root / str(count)), {f"__{rank}_0.distcp": EMPTY for rank in range(count)}
    folder = run.checkpoints / NAME
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    return run, files


def calls(action: Callable[[], object]) -> Counter[str]:
    """Return how often each function was called, those of C included; file-system calls begin with `posix`."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            found[f"python {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"] += 1
        elif event == "c_call":
            owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
            found[f"{owner} {function.__name__}"] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def file_system(found: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in found.items() if name.startswith(("posix ", "io ", "_io open"))})


def test_a_commit_asks_the_file_system_no_more_for_more_files(tmp_path: Path) -> None:
    counts = []
    for count in (8, 512):
        run, files = written(tmp_path, count)
        counts.append(file_system(calls(lambda run=run, files=files: publish(run, 0, ORDER, files))))  # type: ignore[misc]
        assert mf.verify(run.checkpoints / NAME).ok
    assert counts[0] == counts[1]
    assert counts[0]["posix fsync"] >= 3  # it did count


@pytest.mark.parametrize("what", ["encode", "decode", "judge", "is_complete"])
def test_a_manifest_costs_no_more_than_in_proportion(tmp_path: Path, what: str) -> None:
    totals = []
    for count in (256, 1024):
        run, files = written(tmp_path, count)
        made = publish(run, 0, ORDER, files)
        folder = run.checkpoints / NAME
        data, sizes = mf.encode(made), dict.fromkeys(files, 0)
        action: Callable[[], object] = {
            "encode": lambda made=made: mf.encode(made),
            "decode": lambda data=data: mf.decode(data),
            "judge": lambda data=data, sizes=sizes: mf.judge(data, sizes),  # type: ignore[misc]
            "is_complete": lambda folder=folder: mf.is_complete(folder),
        }[what]
        totals.append(sum(calls(action).values()))
    assert totals[1] <= 4.1 * totals[0]
    assert totals[1] > 1024 or what == "encode"  # which leaves it to json's encoder, in C, whole


def test_a_folder_seen_as_it_was_a_while_ago_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS shows the first names only, until something it does itself has it ask anew."""
    run, files = written(tmp_path, 4)
    shown = [["__0_0.distcp"], ["__0_0.distcp", "__1_0.distcp"]]
    real = os.listdir

    def stale(path: Any) -> list[str]:
        return shown.pop(0) if Path(path).name == NAME and shown else real(path)

    monkeypatch.setattr(os, "listdir", stale)
    publish(run, 0, ORDER, files)
    assert shown == []
    assert mf.is_complete(run.checkpoints / NAME).ok
    assert sorted(real(run.checkpoints / NAME)) == sorted([*files, mf.NAME])


def test_sizes_seen_as_they_were_a_while_ago_fail_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, files = written(tmp_path, 4)
    monkeypatch.setattr(mf, "folder_sizes", lambda _: dict.fromkeys(files, 7))
    publish(run, 0, ORDER, files)
    monkeypatch.undo()
    assert mf.is_complete(run.checkpoints / NAME).ok


def test_a_file_that_is_not_in_the_folder_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer told of it in good faith: it wrote on its own disk, where the file system is to be mounted."""
    run, files = written(tmp_path, 4)
    (run.checkpoints / NAME / "__3_0.distcp").unlink()
    monkeypatch.setattr(coordinator, "STALE_S", 0.2)
    with pytest.raises(IncompleteError, match=r"__3_0\.distcp: missing"):
        publish(run, 0, ORDER, files)
    assert sorted(os.listdir(run.checkpoints / NAME)) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


def test_an_attempt_fenced_off_while_it_looks_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, files = written(tmp_path, 2)
    real = os.listdir

    def meanwhile(path: Any) -> list[str]:
        if Path(path).name == NAME:
            run.attempt(1).path.mkdir(parents=True)
        return real(path)

    monkeypatch.setattr(os, "listdir", meanwhile)
    with pytest.raises(FencedError):
        publish(run, 0, ORDER, files)
    assert not (run.checkpoints / NAME / mf.NAME).exists()


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_a_commit_that_fails_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """What was told to have failed must not pass for complete later, not even where the last fsync failed."""
    run, files = written(tmp_path, 2)
    left, real = [at], os.fsync

    def failing(fd: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        publish(run, 0, ORDER, files)
    assert not (run.checkpoints / NAME / mf.NAME).exists()
