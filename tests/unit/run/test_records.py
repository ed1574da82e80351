"""What claim and the launches leave behind, and the stop request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.errors import IncompleteError
from pctool.run.layout import AttemptDir, RunDir, write_atomic
from pctool.run.records import (
    CAUSES,
    Claim,
    NodeExit,
    claim_bytes,
    read_claim,
    read_node_exits,
    write_node_exit,
)
from pctool.run.stop import StopRequest, read_stop, write_stop

CLAIM = Claim(job_id="42", restart=1, nonce="abc", host="h", nodes=("a", "b"), time=12.5, hub="10.0.0.1:7000")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path).attempt(2)
    attempt.path.mkdir(parents=True)
    return attempt


def test_a_claim_reads_back(attempt: AttemptDir) -> None:
    write_atomic(attempt.claim, claim_bytes(CLAIM))
    assert read_claim(attempt) == CLAIM


def test_a_claim_of_a_newer_version_reads_without_what_is_new(attempt: AttemptDir) -> None:
    attempt.claim.write_text(json.dumps({**json.loads(claim_bytes(CLAIM)), "more": 1}))
    assert read_claim(attempt) == CLAIM


def test_an_attempt_whose_owner_died_before_its_claim_has_none(attempt: AttemptDir) -> None:
    assert read_claim(attempt) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"nodes": ["a"]}', '{"nodes": 3}'])
def test_a_damaged_claim_is_named(attempt: AttemptDir, text: str) -> None:
    attempt.claim.write_text(text)
    with pytest.raises(IncompleteError, match=r"claim\.json: not a claim"):
        read_claim(attempt)


def test_node_records_read_back_by_node(attempt: AttemptDir) -> None:
    records = {
        name: NodeExit(node=name, cause=cause, code=code, time=1.0, why=f"why {name}", saved=cause == "stop")
        for name, cause, code in zip("abcde", CAUSES, (0, 0, 1, 3, 143), strict=True)
    }
    for record in records.values():
        write_node_exit(attempt, record)
    assert read_node_exits(attempt) == records


def test_no_records_before_the_first_launch_ends(attempt: AttemptDir) -> None:
    assert read_node_exits(attempt) == {}
    attempt.nodes.mkdir()
    attempt.node_start("a").write_text("{}")
    assert read_node_exits(attempt) == {}


def test_a_second_record_of_a_node_replaces_the_first(attempt: AttemptDir) -> None:
    for code in (1, 2):
        write_node_exit(attempt, NodeExit(node="a", cause="program-error", code=code, time=1.0))
    assert read_node_exits(attempt)["a"].code == 2


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"node": "a"}', b"\xff", b'{"node": "a", "more": 1}'])
def test_a_damaged_node_record_is_named(attempt: AttemptDir, data: bytes) -> None:
    attempt.nodes.mkdir()
    attempt.node_exit("a").write_bytes(data)
    with pytest.raises(IncompleteError, match=r"a\.exit: not a node record"):
        read_node_exits(attempt)


@given(
    st.builds(
        StopRequest,
        why=st.text(),
        who=st.text(),
        deadline=st.floats(allow_nan=False, allow_infinity=False),
        requeue=st.booleans(),
    )
)
def test_a_stop_request_reads_back(tmp_path_factory: pytest.TempPathFactory, request_: StopRequest) -> None:
    attempt = RunDir(tmp_path_factory.mktemp("run")).attempt(0)
    attempt.path.mkdir(parents=True)
    write_stop(attempt, request_)
    assert read_stop(attempt) == request_


def test_no_file_is_no_request(attempt: AttemptDir) -> None:
    assert read_stop(attempt) is None


@pytest.mark.parametrize(
    "data", [b"", b"please", b"[]", b"3", b"\xff\xfe", b'{"deadline": "soon"}', b'{"deadline": [1]}']
)
def test_any_other_file_still_means_stop(attempt: AttemptDir, data: bytes) -> None:
    attempt.stop.write_bytes(data)
    assert read_stop(attempt) == StopRequest(why="user")


def test_what_the_batch_script_writes_is_a_request(attempt: AttemptDir) -> None:
    attempt.stop.write_text(json.dumps({"why": "time-limit", "deadline": None}))
    assert read_stop(attempt) == StopRequest(why="time-limit")
