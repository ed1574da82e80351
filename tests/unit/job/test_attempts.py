"""What happened in each attempt, from ledgers written by the real Ledger."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pctool.job.attempts import PHASES, as_json, attempts_of
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, NodeExit, claim_bytes, write_node_exit

Write = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def at(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return `at(time, attempt, event, **fields)`, which writes to the ledger as if it were that time."""

    def write(when: float, attempt: int | None, event: str, /, **fields: Any) -> None:
        monkeypatch.setattr(time, "time", lambda: when)
        Ledger(run.ledger).append(event, attempt=attempt, **fields)
        if event == "claim" and attempt is not None:
            nodes = tuple(fields["nodes"])
            claim = Claim(job_id="7", restart=attempt, nonce="n", host="a", nodes=nodes, time=when, hub="a:1")
            run.attempt(attempt).nodes.mkdir(parents=True)
            run.attempt(attempt).claim.write_bytes(claim_bytes(claim))

    return write


def test_no_attempt_yet(run: RunDir) -> None:
    assert attempts_of(run, alive=False) == []
    assert as_json([]) == {"attempts": []}


def test_a_notice_then_the_end(run: RunDir, at: Write) -> None:
    at(100, None, "submitted", job_id="7")
    at(110, 0, "claim", job_id="7", restart=0, nodes=["a", "b"], host="a")
    at(115, 0, "started", nodes=2, seconds=5)
    at(125, 0, "first-step", step=1)
    at(200, 0, "stop-requested", why="notice", node="b", deadline=320)
    at(203, 0, "committed", name="000000-00000400", step=400, bytes=1, seconds=2, tier="posix")
    at(210, 0, "decided", code=85, cause="stop", why="stopped (notice), saved", requeue="exit-code")
    at(281, 1, "claim", job_id="7", restart=1, nodes=["a", "c"], host="a")
    at(283, 1, "started", nodes=2, seconds=2)
    at(290, 1, "resumed", name="000000-00000400", step=400, tier="posix", seconds=3)
    at(291, 1, "first-step", step=401)
    at(391, 1, "committed", name="000001-00000500", step=500, bytes=1, seconds=2, tier="posix")
    at(392, 1, "node-exit", node="a", cause="done", code=0)
    at(394, 1, "decided", code=0, cause="done", why="every node finished", requeue="none")
    first, second = attempts_of(run, alive=False)
    assert (first.attempt, first.job_id, first.restart, first.nodes) == (0, "7", 0, ("a", "b"))
    assert (first.cause, first.first_step, first.last_step, first.lost_steps) == ("stop", 1, 400, 0)
    assert first.phases == {"queued": 10, "starting": 5, "restoring": 10, "training": 75, "ending": 10}
    assert (second.cause, second.first_step, second.last_step, second.lost_steps) == ("done", 401, 500, 0)
    assert second.phases == {"queued": 71, "starting": 2, "restoring": 8, "training": 101, "ending": 2}


def lost(run: RunDir, at: Write) -> None:
    """Attempt 0 saved step 400, was at 460 when its batch host died, and 1 resumed from 400."""
    at(10, 0, "claim", job_id="7", restart=0, nodes=["a", "b"], host="a")
    at(20, 0, "first-step", step=1)
    at(90, 0, "committed", name="000000-00000400", step=400, bytes=1, seconds=2, tier="posix")
    beat = {"time": 100.0, "step": 460, "step_time": 99.0, "committed": 400, "saving_since": 0}
    run.attempt(0).heartbeat.write_text(json.dumps(beat))


def test_steps_lost_with_a_node(run: RunDir, at: Write) -> None:
    lost(run, at)
    (alone,) = attempts_of(run, alive=False)
    assert (alone.cause, alone.last_step, alone.lost_steps) == ("peer-lost", 460, 60)
    at(300, 1, "claim", job_id="7", restart=1, nodes=["a", "c"], host="a")
    at(310, 1, "resumed", name="000000-00000400", step=400, tier="posix", seconds=3)
    first, second = attempts_of(run, alive=True)
    assert (first.cause, first.lost_steps, first.ended) == ("peer-lost", 60, 100.0)
    assert first.phases["training"] == 80
    assert (second.cause, second.lost_steps, second.ended) == ("running", None, None)
    assert second.phases == {"queued": 200, "starting": None, "restoring": None, "training": None, "ending": None}


def test_a_resume_further_back_loses_more(run: RunDir, at: Write) -> None:
    lost(run, at)
    at(300, 1, "claim", job_id="7", restart=1, nodes=["a", "b"], host="a")
    at(310, 1, "resumed", name="000000-00000200", step=200, tier="s3", seconds=3)
    assert attempts_of(run, alive=True)[0].lost_steps == 260


def test_a_fresh_start_loses_all(run: RunDir, at: Write) -> None:
    lost(run, at)
    at(300, 1, "claim", job_id="7", restart=1, nodes=["a", "b"], host="a")
    at(310, 1, "fresh")
    assert attempts_of(run, alive=True)[0].lost_steps == 460


def test_an_attempt_that_never_started_ends_where_it_was(run: RunDir, at: Write) -> None:
    at(10, 0, "claim", job_id="7", restart=0, nodes=["a"], host="a")
    at(17, 0, "decided", code=85, cause="stop", why="standing-notice", requeue="exit-code")
    (row,) = attempts_of(run, alive=False)
    assert row.phases == {"queued": None, "starting": 7, "restoring": None, "training": None, "ending": None}
    assert (row.first_step, row.last_step, row.lost_steps) == (None, None, None)


@pytest.mark.parametrize(
    ("causes", "expected"),
    [(["signal", "signal"], "signal"), (["program-error", "peer-lost"], "program-error"), (["peer-lost"], "peer-lost")],
)
def test_the_cause_without_a_decision(run: RunDir, at: Write, causes: list[str], expected: str) -> None:
    at(10, 0, "claim", job_id="7", restart=0, nodes=["a", "b"], host="a")
    for node, cause in zip("ab", causes, strict=False):
        write_node_exit(run.attempt(0), NodeExit(node=node, cause=cause, code=1, time=20.0))
    (row,) = attempts_of(run, alive=False)
    assert (row.cause, row.ended) == (expected, 20.0)


def test_a_folder_without_a_claim_is_an_attempt(run: RunDir) -> None:
    run.attempt(0).path.mkdir(parents=True)
    (row,) = attempts_of(run, alive=False)
    assert (row.attempt, row.job_id, row.nodes) == (0, None, ())


def test_the_json_has_the_stable_keys(run: RunDir, at: Write) -> None:
    lost(run, at)
    (row,) = json.loads(json.dumps(as_json(attempts_of(run, alive=False))))["attempts"]
    stable = {"attempt", "job_id", "restart", "nodes", "cause", "first_step", "last_step", "lost_steps", "phases"}
    assert stable <= set(row)
    assert tuple(row["phases"]) == PHASES
