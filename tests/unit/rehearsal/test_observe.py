from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pctool.rehearsal.faults import flip_byte, newest_checkpoint, newest_data_file
from pctool.rehearsal.observe import RehearsalError, Watcher, read_metrics, wait_event
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.page import Page


def start_record(run: RunDir, attempt: int, page: Page) -> None:
    nodes = run.attempt(attempt).nodes
    nodes.mkdir(parents=True)
    (nodes / "n1.json").write_text(json.dumps({"rank": 0, "page": page.path, "pid": os.getpid()}))


def test_the_watcher_keeps_the_last_step_after_the_launch_is_gone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    page = Page.create()
    start_record(run, 0, page)
    with Watcher(run) as watcher:
        page.report_step(7, time.time())
        watcher.wait_page(0, lambda seen: seen.step >= 7, lambda: None)
        page.report_step(9, time.time())
        watcher.wait_page(0, lambda seen: seen.step >= 9, lambda: None)
        while watcher.attempts.get(0) is None or watcher.attempts[0].last_step < 9:
            time.sleep(0.001)
        page.close()
    assert (watcher.attempts[0].first_step, watcher.attempts[0].last_step) == (7, 9)


def test_a_page_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    nodes = run.attempt(0).nodes
    nodes.mkdir(parents=True)
    (tmp_path / "page").write_bytes(b"")
    (nodes / "n1.json").write_text(json.dumps({"rank": 0, "page": str(tmp_path / "page"), "pid": os.getpid()}))
    with Watcher(run) as watcher:
        assert watcher._thread is not None
        watcher._thread.join(timeout=30)
    with pytest.raises(RehearsalError, match="could not be watched"):
        watcher.check()


def test_waiting_for_a_step_ends_when_the_job_has_ended(tmp_path: Path) -> None:
    with Watcher(RunDir(tmp_path)) as watcher, pytest.raises(RehearsalError, match="the job ended"):
        watcher.wait_page(0, lambda page: True, lambda: "the job ended (FAILED)")


def test_waiting_for_an_event_finds_it_or_says_why_it_cannot_come(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("claim", attempt=0, job_id="1")
    assert wait_event(ledger, lambda e: e.event == "claim", lambda: None, what="claim").attempt == 0
    with pytest.raises(RehearsalError, match="waiting for held: the job ended"):
        wait_event(ledger, lambda e: e.event == "held", lambda: "the job ended", what="held")


def test_metrics_leave_out_the_line_a_killed_rank_tore(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt, text in ((0, '{"step":0,"loss":1.0}\n{"step":1,"lo'), (1, '{"step":1,"loss":0.5}\n')):
        run.attempt(attempt).path.mkdir(parents=True)
        run.logs(attempt).mkdir(parents=True)
        (run.logs(attempt) / "metrics-rank0.jsonl").write_text(text)
    assert {n: [line["step"] for line in lines] for n, lines in read_metrics(run)[0].items()} == {0: [0], 1: [1]}


def test_a_flipped_byte_keeps_the_size_and_changes_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(101)))
    flip_byte(path)
    changed = [i for i, (a, b) in enumerate(zip(bytes(range(101)), path.read_bytes(), strict=True)) if a != b]
    assert changed == [50]


def test_the_newest_checkpoint_is_by_attempt_then_step_and_complete(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name, complete in (("000000-00000090", True), ("000001-00000050", True), ("000001-00000060", False)):
        folder = run.checkpoints / name
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"x" * 10)
        (folder / "__1_0.distcp").write_bytes(b"x" * 20)
        if complete:
            (folder / "MANIFEST").write_text("{}")
    assert newest_checkpoint(run).name == "000001-00000050"
    assert newest_data_file(run).name == "__1_0.distcp"
    with pytest.raises(RehearsalError, match="no complete checkpoint"):
        newest_checkpoint(RunDir(tmp_path / "000001"))
