"""One rank's log across attempts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pctool.errors import NotFoundError
from pctool.job import logs as module
from pctool.job.logs import follow, log_path, read_logs
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes


def attempt(run: RunDir, number: int, text: str | None) -> None:
    claim = Claim(job_id="7", restart=number, nonce="n", host="a", nodes=("a",), time=0.0, hub="a:1")
    run.attempt(number).path.mkdir(parents=True)
    run.attempt(number).claim.write_bytes(claim_bytes(claim))
    run.logs(number).mkdir(parents=True)
    if text is not None:
        log_path(run, number, 0).write_text(text)


def lines(pieces: Iterator[bytes]) -> list[str]:
    return b"".join(pieces).decode().splitlines()


def test_attempts_follow_each_other_with_headers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt(run, 0, "a\nb")
    attempt(run, 1, None)
    attempt(run, 2, "c\n")
    head, a, b, second, c = lines(read_logs(run))
    assert head.startswith("==> attempt 0 (job 7, restart 0, ")
    assert second.startswith("==> attempt 2 (job 7, restart 2, ")
    assert (a, b, c) == ("a", "b", "c")
    assert lines(read_logs(run, last=2)) == [second, "c"]


def test_no_log_yet(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt(run, 0, None)
    with pytest.raises(NotFoundError, match="no attempt has a log of rank 0"):
        list(read_logs(run))


def test_follow_goes_on_over_a_requeue_and_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    run = RunDir(tmp_path)
    attempt(run, 0, None)
    ledger = Ledger(run.ledger)
    seen: list[bytes] = []

    def read() -> None:
        seen.extend(follow(run, rank=0, alive=lambda: True))

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in b"".join(seen).decode():
            assert time.monotonic() < deadline, seen
            time.sleep(0.01)

    reader = threading.Thread(target=read)
    reader.start()
    log_path(run, 0, 0).write_text("one\n")
    wait_for("one")
    with log_path(run, 0, 0).open("a") as stream:
        stream.write("two\n")
    ledger.append("decided", attempt=0, code=85, cause="stop", why="", requeue="exit-code")
    wait_for("two")
    attempt(run, 1, "three\n")
    wait_for("three")
    with log_path(run, 1, 0).open("a") as stream:
        stream.write("four\n")
    ledger.append("decided", attempt=1, code=0, cause="done", why="", requeue="none")
    reader.join(timeout=20)
    assert not reader.is_alive()
    text = [line for line in b"".join(seen).decode().splitlines() if not line.startswith("==>")]
    assert text == ["one", "two", "three", "four"]


def test_follow_ends_when_slurm_has_lost_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "ASK_SLURM_S", 0.0)
    run = RunDir(tmp_path)
    attempt(run, 0, "one\n")
    assert lines(follow(run, rank=0, alive=lambda: False, last=1)) == ["one"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("ab\n", max_size=9)), st.integers(1, 5))
def test_the_last_lines_are_the_last_lines(pieces: list[str], count: int) -> None:
    found = b"".join(module._tail((piece.encode() for piece in pieces), count)).decode()
    assert found.split("\n") == "".join(pieces).split("\n")[-count - "".join(pieces).endswith("\n") :]
