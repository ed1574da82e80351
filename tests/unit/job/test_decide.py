"""What becomes of a job, from the nodes' records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.errors import HOLD, REQUEUE, FencedError, SlurmError
from pctool.job import decide as module
from pctool.job.decide import Decision, Ending, conclude, decide, ending_from, requeue_wanted
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import CAUSES, Claim, NodeExit, claim_bytes, write_node_exit
from pctool.run.stop import StopRequest, write_stop
from pctool.slurm import query
from pctool.slurm.parse import JobInfo, parse_jobs

NODES = ("a", "b", "c")


def claim(**changes: Any) -> Claim:
    fields = {"job_id": "7", "restart": 1, "nonce": "n", "host": "a", "nodes": NODES, "time": 0.0, "hub": "a:1"}
    return Claim(**{**fields, **changes})


def ended(node: str, cause: str, code: int = 0, time: float = 1.0, **more: Any) -> NodeExit:
    return NodeExit(node=node, cause=cause, code=code, time=time, **more)


def by_node(*records: NodeExit) -> dict[str, NodeExit]:
    return {record.node: record for record in records}


def verdict(*records: NodeExit, stop: StopRequest | None = None, newest: int = 3, may_requeue: bool = True) -> Decision:
    return decide(claim(), by_node(*records), stop, attempt=3, newest_attempt=newest, may_requeue=may_requeue)


def test_all_done() -> None:
    found = verdict(*(ended(node, "done") for node in NODES))
    assert (found.code, found.cause, found.requeue) == (0, "done", False)


def test_all_done_in_spite_of_a_stop_request() -> None:
    assert verdict(*(ended(node, "done") for node in NODES), stop=StopRequest(why="notice")).cause == "done"


def test_a_saved_stop_is_requeued() -> None:
    found = verdict(*(ended(node, "stop", saved=True) for node in NODES), stop=StopRequest(why="notice"))
    assert (found.code, found.cause, found.requeue) == (REQUEUE, "stop", True)
    assert "saved" in found.why


def test_only_rank_0s_node_knows_whether_a_stop_was_saved() -> None:
    """The ranks of the others have written their part, and end before rank 0 has committed, or has failed to."""
    others = [ended("b", "stop", saved=True), ended("c", "stop", saved=True)]
    found = verdict(ended("a", "stop", saved=False), *others, stop=StopRequest(why="notice"))
    assert not found.saved
    assert "not saved" in found.why
    assert not verdict(*others, stop=StopRequest(why="notice")).saved  # lost before it could say
    assert verdict(ended("a", "stop", saved=True), *others, stop=StopRequest(why="notice")).saved


def test_a_stop_without_a_stop_file_is_requeued() -> None:
    found = verdict(*(ended(node, "stop", why="standing-notice") for node in NODES))
    assert (found.code, found.requeue) == (REQUEUE, True)
    assert found.why == "stepped back before the start (standing-notice)"


def test_a_node_that_left_no_record_is_a_loss() -> None:
    found = verdict(ended("a", "peer-lost", 1), ended("c", "peer-lost", 1))
    assert (found.code, found.cause, found.requeue) == (REQUEUE, "peer-lost", True)
    assert "no record of b" in found.why


def test_no_record_at_all_is_a_loss() -> None:
    assert verdict().requeue


def test_a_program_error_wins_over_a_lost_peer_whatever_the_times() -> None:
    found = verdict(
        ended("a", "peer-lost", 1, 1.0), ended("b", "program-error", 7, 2.0), ended("c", "peer-lost", 1, 3.0)
    )
    assert (found.code, found.cause, found.requeue) == (7, "program-error", False)


def test_a_program_error_wins_over_a_missing_record_and_a_stop() -> None:
    found = verdict(ended("a", "program-error", 3), stop=StopRequest(why="notice"))
    assert (found.code, found.cause, found.requeue) == (3, "program-error", False)


def test_the_first_program_error_gives_the_code() -> None:
    found = verdict(ended("a", "program-error", 3, 9.0), ended("b", "program-error", 4, 8.0, why="KeyError: 'x'"))
    assert found.code == 4
    assert found.why == "b: KeyError: 'x'"


@pytest.mark.parametrize("code", [0, REQUEUE, HOLD, -9, 256])
def test_a_program_that_exits_with_our_own_codes_is_not_requeued(code: int) -> None:
    assert verdict(ended("a", "program-error", code)).code == 1


def test_a_crash_is_a_program_error_and_a_kill_is_not() -> None:
    crash = verdict(ended("a", "peer-lost", 1), ended("b", "signal", 139), ended("c", "peer-lost", 1))
    assert (crash.code, crash.cause, crash.requeue) == (139, "program-error", False)
    kill = verdict(ended("a", "peer-lost", 1), ended("b", "signal", 137), ended("c", "peer-lost", 1))
    assert (kill.code, kill.cause, kill.requeue) == (REQUEUE, "peer-lost", True)
    assert verdict(*(ended(node, "signal", 143) for node in NODES)).cause == "signal"


@pytest.mark.parametrize(
    ("stop", "may_requeue", "code", "requeue"),
    [
        (StopRequest(why="user", who="ada", requeue=False), True, 0, False),
        (StopRequest(why="user", who="ada", requeue=True), True, REQUEUE, True),
        (StopRequest(why="user", who="ada", requeue=False), False, 0, False),
        (StopRequest(why="user", who="ada", requeue=True), False, 4, False),
        (StopRequest(why="time-limit"), True, REQUEUE, True),
        (StopRequest(why="time-limit"), False, 4, False),
        (StopRequest(why="notice"), False, 4, False),
    ],
)
def test_stops(stop: StopRequest, may_requeue: bool, code: int, requeue: bool) -> None:
    found = verdict(*(ended(node, "stop", saved=True) for node in NODES), stop=stop, may_requeue=may_requeue)
    assert (found.code, found.cause, found.requeue) == (code, "stop", requeue)


def test_a_loss_that_may_not_be_requeued_fails_the_job() -> None:
    found = verdict(ended("a", "peer-lost", 1), may_requeue=False)
    assert (found.code, found.requeue) == (1, False)


def test_a_newer_attempt_fences_everything() -> None:
    found = verdict(*(ended(node, "stop") for node in NODES), newest=4)
    assert (found.code, found.cause, found.requeue) == (FencedError.exit_code, "fenced", False)


RECORDS = st.dictionaries(
    st.sampled_from(NODES),
    st.builds(
        ended, st.just("a"), st.sampled_from(CAUSES), st.integers(-20, 300), st.floats(0, 9), saved=st.booleans()
    ),
)
STOPS = st.none() | st.builds(StopRequest, why=st.sampled_from(["notice", "time-limit", "user"]), requeue=st.booleans())


@given(RECORDS, STOPS, st.booleans())
def test_code_and_requeue_always_agree(exits: dict[str, NodeExit], stop: StopRequest | None, may: bool) -> None:
    found = decide(claim(), exits, stop, attempt=3, newest_attempt=3, may_requeue=may)
    assert found.requeue == (found.code == REQUEUE)
    assert found.code != HOLD
    assert may or not found.requeue
    assert (found.cause == "done") == (len(exits) == 3 and all(record.cause == "done" for record in exits.values()))
    if any(record.cause == "program-error" for record in exits.values()):
        assert not found.requeue
        assert found.code != 0


JOB = """JobId=7 JobName=x
   UserId=ada(1) GroupId=ada(1)
   Priority=1 Nice=0
   JobState={state} Reason=None
   Requeue={requeue} Restarts=1
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return `set_up(codes, state, requeue)`, which answers for Slurm and returns the jobs requeued by scontrol."""

    def set_up(codes: frozenset[int] = frozenset({85}), state: str = "RUNNING", requeue: int = 1) -> list[str]:
        requeued: list[str] = []

        def show_job(job_id: str, **_: float) -> JobInfo:
            return parse_jobs(JOB.format(state=state, requeue=requeue))[0]

        monkeypatch.setattr(query, "show_job", show_job)
        monkeypatch.setattr(query, "requeue_exit_codes", lambda: (codes, frozenset()))

        def by_scontrol(job_id: str) -> bool:
            requeued.append(job_id)
            return True

        monkeypatch.setattr(module, "requeue_by_scontrol", by_scontrol)
        return requeued

    return set_up


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.attempt(3).nodes.mkdir(parents=True)
    found.attempt(3).claim.write_bytes(claim_bytes(claim()))
    for node in NODES:
        write_node_exit(found.attempt(3), ended(node, "stop", saved=True))
    return found


def ending(run: RunDir, **changes: Any) -> Ending:
    return Ending(**{"run": run, "attempt": 3, "nonce": "n", "job_id": "7", "may_requeue": True, **changes})


def last_event(run: RunDir) -> dict[str, Any]:
    return Ledger(run.ledger).read()[-1].fields


def test_requeue_by_exit_code(run: RunDir, slurm: Callable[..., list[str]]) -> None:
    requeued = slurm()
    found = conclude(ending(run, srun_code=1))
    assert (found.decision.code, found.means, requeued) == (REQUEUE, "exit-code", [])
    assert last_event(run) == {
        "code": REQUEUE, "cause": "stop", "why": found.decision.why, "saved": found.decision.saved,
        "requeue": "exit-code", "srun_code": 1,
    }  # fmt: skip


def test_requeue_by_scontrol_where_the_exit_code_would_not_do(run: RunDir, slurm: Callable[..., list[str]]) -> None:
    requeued = slurm(frozenset({1}))
    found = conclude(ending(run))
    assert (found.means, requeued, last_event(run)["requeue"]) == ("scontrol", ["7"], "scontrol")


@pytest.mark.parametrize(("state", "requeue"), [("COMPLETING", 1), ("CANCELLED", 1), ("RUNNING", 0)])
def test_a_cancelled_or_unrequeueable_job_is_not_requeued(
    run: RunDir, slurm: Callable[..., list[str]], state: str, requeue: int
) -> None:
    requeued = slurm(frozenset(), state, requeue)
    found = conclude(ending(run))
    assert (found.decision.code, found.means, requeued) == (4, "none", [])
    assert last_event(run)["requeue"] == "none"


def test_slurm_that_does_not_answer_costs_no_requeue(
    run: RunDir, slurm: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm()

    def silent(call: Callable[[], object], **_: float) -> object:
        raise SlurmError("`scontrol show config` gave no answer in 30 s")

    monkeypatch.setattr(query, "patiently", silent)
    found = conclude(ending(run))
    assert (found.decision.code, found.means) == (REQUEUE, "exit-code")
    assert "no answer" in found.decision.why


def patience_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make Slurm silent; return how long decide was ready to wait for it."""
    asked: list[float] = []

    def silent(call: Callable[[], object], *, patience: float = query.PATIENCE_S) -> object:
        asked.append(patience)
        raise SlurmError("slurmctld is silent")

    monkeypatch.setattr(query, "patiently", silent)
    return asked


@pytest.mark.parametrize(
    ("means", "patience"),
    [("exit-code", query.PATIENCE_S), ("scontrol", query.LONG_PATIENCE_S), ("", query.LONG_PATIENCE_S)],
)
def test_decide_waits_longer_where_the_exit_code_would_end_the_job(
    run: RunDir, slurm: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, means: str, patience: float
) -> None:
    slurm()
    run.attempt(3).claim.write_bytes(claim_bytes(claim(means=means)))
    asked = patience_of(monkeypatch)
    assert conclude(ending(run)).decision.code == REQUEUE
    assert asked == [patience]


@pytest.mark.parametrize(("requeue", "code"), [(False, 4), (True, REQUEUE), (None, REQUEUE)])
def test_a_silent_slurm_does_not_requeue_a_job_that_asked_for_none(
    run: RunDir, slurm: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, requeue: bool | None, code: int
) -> None:
    """An exit code that RequeueExit has requeues a --no-requeue job as well."""
    slurm()
    run.attempt(3).claim.write_bytes(claim_bytes(claim(requeue=requeue)))
    patience_of(monkeypatch)
    found = conclude(ending(run))
    assert (found.decision.code, found.decision.requeue) == (code, code == REQUEUE)
    assert ("--no-requeue" in found.decision.why) == (requeue is False)


def test_a_requeue_that_does_not_get_through_is_left_to_the_exit_code(
    run: RunDir, slurm: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(frozenset())
    monkeypatch.setattr(module, "requeue_by_scontrol", lambda job_id: False)
    found = conclude(ending(run))
    assert (found.decision.code, found.means) == (REQUEUE, "exit-code")


@pytest.mark.parametrize("torn", ["", '{"job_id": "7", ', '{"job_id": "7"}'])
def test_a_torn_claim_costs_no_requeue(run: RunDir, slurm: Callable[..., list[str]], torn: str) -> None:
    slurm()
    run.attempt(3).claim.write_text(torn)
    found = conclude(ending(run))
    assert (found.decision.code, found.decision.requeue) == (REQUEUE, True)
    assert "claim.json: not a claim" in found.decision.why


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1", "PCTOOL_ATTEMPT": "0"}
    options: dict[str, Any] = {"run_dir": str(tmp_path), "attempt": None, "srun_code": 1, "may_requeue": True}
    assert ending_from(environ, **options).job_id == "9_1"
    assert ending_from({**environ, "SLURM_ARRAY_JOB_ID": ""}, **options).job_id == "9"


def test_a_stop_that_asks_for_a_requeue_that_is_not_allowed_says_so(
    run: RunDir, slurm: Callable[..., list[str]]
) -> None:
    slurm(requeue=0)
    write_stop(run.attempt(3), StopRequest(why="user", who="ada", requeue=True))
    found = conclude(ending(run)).decision
    assert (found.code, found.requeue) == (4, False)
    assert "--no-requeue" in found.why
    run.job_toml.write_text("requeue = false\n")
    found = conclude(ending(run)).decision
    assert found.code == 4
    assert "may not be requeued" in found.why
    assert "as ada asked" not in found.why


def test_a_fenced_attempt_writes_nothing(run: RunDir, slurm: Callable[..., list[str]]) -> None:
    requeued = slurm(frozenset())
    run.attempt(4).path.mkdir()
    found = conclude(ending(run))
    assert (found.decision.cause, requeued) == ("fenced", [])
    assert not run.ledger.exists()


def test_another_start_s_attempt_is_refused(run: RunDir, slurm: Callable[..., list[str]]) -> None:
    slurm()
    with pytest.raises(FencedError, match="belongs to job 7"):
        conclude(ending(run, nonce="other"))


def test_a_torn_record_counts_as_none(
    run: RunDir, slurm: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm()
    for node in NODES:
        write_node_exit(run.attempt(3), ended(node, "done"))
    run.attempt(3).node_exit("b").write_text('{"node": "b", "ca')
    found = conclude(ending(run))
    assert found.decision.requeue
    assert "no record of b" in found.decision.why
    assert "b.exit" in capsys.readouterr().err


def test_a_ledger_that_cannot_be_written_costs_no_requeue(
    run: RunDir, slurm: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm()
    run.ledger.symlink_to(run.path / "nowhere" / "ledger")  # stands for a full disk
    assert conclude(ending(run)).decision.code == REQUEUE
    assert "ledger.jsonl cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["attempts", "claim"])
def test_a_file_system_that_fails_at_the_end_costs_no_requeue(
    run: RunDir, slurm: Callable[..., list[str]], gone: str
) -> None:
    slurm()
    if gone == "attempts":
        run.attempts.rename(run.path / "elsewhere")
    else:
        run.attempt(3).claim.unlink()
        run.attempt(3).claim.mkdir()  # cannot be read
    found = conclude(ending(run))
    assert (found.decision.code, found.decision.requeue) == (REQUEUE, True)
    assert "the records cannot be read" in last_event(run)["why"]
    assert not conclude(ending(run, may_requeue=False)).decision.requeue


def test_the_spec_may_forbid_a_requeue(run: RunDir, slurm: Callable[..., list[str]]) -> None:
    slurm()
    write_stop(run.attempt(3), StopRequest(why="time-limit"))
    run.job_toml.write_text("requeue = false\n")
    assert conclude(ending(run)).decision.code == 4
    run.job_toml.write_text("requeue = [\n")
    assert requeue_wanted(run)
    assert conclude(ending(run)).decision.code == REQUEUE
