"""A stop while the writer hangs: the ranks end by the deadline, and what was complete stands."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from engine_gang import Gang, complete_steps, events, send, wait_for

from pctool.run.layout import RunDir

pytestmark = pytest.mark.torch


def test_a_stop_with_a_deadline_ends_in_time_although_a_writer_hangs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    gang = Gang(run, 0, tmp_path, job={"kib": 64, "every": 10, "step_s": 0.1})
    gang.start()
    try:
        gang.await_commit(10)
        gang.await_step(15)  # by then every rank has heard of it
        slow = gang.writer_of(1)
        assert slow is not None
        send(slow, signal.SIGSTOP)
        gang.await_step(22)  # the save of step 20 hangs, and training goes on
        deadline = time.time() + 8.0
        gang.stop(deadline)
        for process in gang.ranks:
            process.join(30.0)
        assert [process.exitcode for process in gang.ranks] == [0, 0], gang.log()
        assert time.time() < deadline + 5.0
        assert set(complete_steps(run).values()) == {10}
        assert events(run, "stop-step")
        send(slow, signal.SIGCONT)  # both ranks had copied it: their writers end it without them
        wait_for("the copied save", lambda: 20 in complete_steps(run).values())
        wait_for("the end of all writers", lambda: not gang.writer_pids())
    finally:
        gang.close()
