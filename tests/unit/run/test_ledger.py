"""The ledger: nothing whole is ever lost, whatever happened to a writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pctool.run.ledger import EVENTS, Ledger

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
fields = st.dictionaries(
    st.text(min_size=1).filter(lambda key: key not in {"time", "attempt", "event", "self"}),
    st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=4,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_no_file_is_no_events(ledger: Ledger) -> None:
    assert ledger.read() == []


def test_keeps_order_and_fields(ledger: Ledger) -> None:
    ledger.append("claim", attempt=0, job_id="7", nodes=["a", "b"])
    ledger.append("submitted", job_id="7")
    first, second = ledger.read()
    assert (first.event, first.attempt, first.fields) == ("claim", 0, {"job_id": "7", "nodes": ["a", "b"]})
    assert (second.event, second.attempt, second.fields) == ("submitted", None, {"job_id": "7"})
    assert first.time <= second.time


def test_refuses_an_event_nobody_defined(ledger: Ledger) -> None:
    with pytest.raises(KeyError, match="exploded"):
        ledger.append("exploded")
    assert not ledger.path.exists()


@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.none() | st.integers(0, 10**6), fields), max_size=5))
@settings(max_examples=30)
def test_reads_back_whatever_json_can_hold(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int | None, dict[str, object]]]
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    for event, attempt, extra in events:
        ledger.append(event, attempt=attempt, **extra)
    assert [(event.event, event.attempt, event.fields) for event in ledger.read()] == events
    assert not events or len(ledger.path.read_bytes().splitlines()) == len(events)


def test_a_writer_that_died_at_any_byte_costs_only_its_own_event(tmp_path: Path) -> None:
    whole = Ledger(tmp_path / "whole")
    for step in (100, 200):
        whole.append("committed", attempt=0, step=step)
    data = whole.path.read_bytes()
    second = data.index(b"\n") + 1
    for cut in range(second, len(data)):
        torn = Ledger(tmp_path / f"torn-{cut}")
        torn.path.write_bytes(data[:cut])
        torn.append("committed", attempt=1, step=300)
        steps = [event.fields["step"] for event in torn.read()]
        # a line that lacks only its newline is whole
        assert steps == ([100, 200, 300] if cut == len(data) - 1 else [100, 300])


@pytest.mark.parametrize(
    "line", [b"\x00\x00\x00", b"null", b"[]", b"3", b'{"time": 1}', b"\xff\xfe", b'{"event": "claim"}']
)
def test_lines_that_are_no_events_are_left_out(ledger: Ledger, line: bytes) -> None:
    ledger.append("fresh", attempt=0)
    with ledger.path.open("ab") as file:
        file.write(line + b"\n")
    ledger.append("first-step", attempt=0, step=1)
    assert [event.event for event in ledger.read()] == ["fresh", "first-step"]


def test_a_partial_write_is_an_error_and_not_silence(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="in part"):
            ledger.append("claim", attempt=0)
    ledger.append("fresh", attempt=1)
    assert [event.event for event in ledger.read()] == ["fresh"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named_by_its_file(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space") as error:
        ledger.append("claim", attempt=0)
    assert error.value.filename == str(ledger.path)


def test_appends_of_many_processes_stay_whole(ledger: Ledger) -> None:
    program = """
import sys
from pathlib import Path
from pctool.run.ledger import Ledger
for step in range(50):
    Ledger(Path(sys.argv[1])).append("committed", attempt=int(sys.argv[2]), step=step, name="x" * 3000)
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(ledger.path), str(n)]) for n in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    for number in range(4):
        assert [e.fields["step"] for e in ledger.read() if e.attempt == number] == list(range(50))
    lines = ledger.path.read_bytes().split(b"\n")
    assert len([json.loads(line) for line in lines if line]) == 200  # an empty line may follow a write seen half-way
