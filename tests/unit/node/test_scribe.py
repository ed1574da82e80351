"""What the scribe says of a file system that refuses."""

from __future__ import annotations

import errno
import queue
from pathlib import Path

import pytest

from pctool.node import scribe as module
from pctool.node.config import LaunchConfig, read_config
from pctool.node.scribe import Scribe


def config(tmp_path: Path) -> LaunchConfig:
    (tmp_path / "run" / "attempts" / "000000").mkdir(parents=True)
    environ = {
        "PCTOOL_RUN_DIR": str(tmp_path / "run"),
        "PCTOOL_ATTEMPT": "0",
        "PCTOOL_NONCE": "x",
        "PCTOOL_HUB": "h:1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURMD_NODENAME": "n0",
    }
    return read_config(environ, per_node=1, python="python", script=["x.py"], stop_signal=None, poll_s=1.0)


def test_a_full_disk_is_told_once_however_often_other_work_succeeds_and_again_when_it_was_empty_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: queue.Queue[bool] = queue.Queue()
    full = True

    def write(*_args: object) -> None:
        beats.put(full)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_atomic", write)
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.03)
    monkeypatch.setattr(module, "STOP_POLL_S", 0.01)
    said: list[str] = []
    scribe = Scribe(config(tmp_path), heartbeat=dict, on_stop=lambda _: None, complain=said.append)

    def beaten(times: int, *, when: bool) -> None:
        while times:
            times -= beats.get(timeout=20) is when

    scribe.start()
    scribe.log("this succeeds")
    beaten(6, when=True)
    assert len(said) == 1, said
    full = False
    beaten(2, when=False)
    full = True
    beaten(2, when=True)
    assert scribe.close(seconds=20)
    assert len(said) == 2, said
