"""Claiming attempts: one winner a number, no second job on a live run, holds instead of losing work."""

from __future__ import annotations

import errno
import multiprocessing
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pctool.checkpoint.foreign import ForeignCheckpointError
from pctool.checkpoint.lineage import BelowDurableError
from pctool.checkpoint.stores import StoreUnreadableError
from pctool.errors import RunInUseError, SlurmError, UsageError
from pctool.job import claim as module
from pctool.job.claim import Claimed, Start, claim_attempt, publish, start_from, take
from pctool.job.heartbeat import FORGOTTEN_S, SILENT_S
from pctool.job.hold import Held
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import Claim, claim_bytes, read_claim
from pctool.slurm import query
from pctool.slurm.comment import format_comment
from pctool.slurm.parse import parse_jobs


class FakeSlurm:
    """Answers for Slurm: states by job id, RequeueExitHold, and what was asked of it."""

    def __init__(self) -> None:
        self.states: dict[str, str] | None = {}
        self.hold_codes = frozenset({86})
        self.settings = {"ClusterName": "c", "SlurmctldHost[0]": "head", "RequeueExit": "85"}
        self.asked: list[Sequence[str]] = []

    def job_states(self, ids: Sequence[str], **_: float) -> dict[str, str]:
        if self.states is None:
            raise SlurmError("slurmctld is silent")
        return {job_id: self.states[job_id] for job_id in ids if job_id in self.states}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(query, "job_states", fake.job_states)
    monkeypatch.setattr(query, "hostnames", lambda nodelist, **_: tuple(nodelist.split(",")))
    monkeypatch.setattr(query, "node_addr", lambda name, **_: "127.0.0.1")
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: None)
    monkeypatch.setattr(query, "config", lambda: fake.settings)
    monkeypatch.setattr(query, "patiently", lambda call, **_: call())
    codes = query.requeue_exit_codes
    monkeypatch.setattr(
        query,
        "requeue_exit_codes",
        lambda settings=None: codes(settings) if settings else (frozenset({85}), fake.hold_codes),
    )

    class Done:
        code, stdout, stderr = 0, "", ""

    def ask(argv: Sequence[str], **_: Any) -> Done:
        fake.asked.append(argv)
        return Done()

    monkeypatch.setattr(query, "ask", ask)
    return fake


def start(run: RunDir, **changes: Any) -> Start:
    fields = {
        "run": run, "job_id": "7", "restart": 0, "node": "n1", "nodelist": "n1,n2", "cluster": "c",
        "store": None, "max_stalled": 3,
    }  # fmt: skip
    return Start(**{**fields, **changes})


def some_claim(nonce: str, **changes: Any) -> Claim:
    fields = {"job_id": "7", "restart": 0, "host": "n1", "nodes": ("n1",), "time": time.time(), "hub": "n1:1"}
    return Claim(**{**fields, "nonce": nonce, **changes})


def claimed(outcome: Claimed | Held) -> Claimed:
    assert isinstance(outcome, Claimed), outcome
    return outcome


def held(outcome: Claimed | Held) -> Held:
    assert isinstance(outcome, Held), outcome
    return outcome


def test_the_first_start_makes_the_run_directory(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path / "new")
    first = claimed(claim_attempt(start(run)))
    assert first.attempt == 0
    assert first.resume is None
    assert read_claim(run.attempt(0)) == first.claim
    assert first.claim.nodes == ("n1", "n2")
    assert first.claim.hub.startswith("127.0.0.1:")
    (event,) = Ledger(run.ledger).read()
    assert (event.event, event.attempt) == ("claim", 0)
    assert event.fields == {"job_id": "7", "restart": 0, "nodes": ["n1", "n2"], "host": "n1"}


def test_the_exports_survive_a_shell(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path / "my $run's")
    lines = claimed(claim_attempt(start(run))).exports().splitlines()
    words = [shlex.split(line) for line in lines]
    assert all(word[0] == "export" for word in words)
    values = dict(word[1].split("=", 1) for word in words)
    assert set(values) == {"PCTOOL_RUN_DIR", "PCTOOL_ATTEMPT", "PCTOOL_NONCE", "PCTOOL_HUB"}
    assert values["PCTOOL_RUN_DIR"] == str(run.path)


def test_a_restart_takes_the_next_number(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    slurm.states = {"7": "RUNNING"}  # this very job
    assert claimed(claim_attempt(start(run, restart=1))).attempt == 1


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "SUSPENDED", "SPECIAL_EXIT"])
def test_a_live_job_s_run_is_not_taken(tmp_path: Path, slurm: FakeSlurm, state: str) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    slurm.states = {"7": state}
    with pytest.raises(RunInUseError, match="held by job 7") as error:
        claim_attempt(start(run, job_id="8"))
    assert error.value.exit_code == 3
    assert run.attempt_numbers() == [0]


@pytest.mark.parametrize("states", [{"7": "COMPLETED"}, {"7": "NODE_FAIL"}])
def test_a_gone_job_s_run_is_taken_at_once(tmp_path: Path, slurm: FakeSlurm, states: dict[str, str]) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    slurm.states = states
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 1


def claimed_before(run: RunDir, attempt: int, seconds: float) -> None:
    """Set back the time of a claim."""
    owner = read_claim(run.attempt(attempt))
    assert owner is not None
    run.attempt(attempt).claim.write_bytes(claim_bytes(replace(owner, time=owner.time - seconds)))


def test_a_job_that_slurm_does_not_know_must_be_silent_too(tmp_path: Path, slurm: FakeSlurm) -> None:
    """It may live on another cluster of the same name, which is what ParallelCluster gives to all of them."""
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    claimed_before(run, 0, 9999)
    run.attempt(0).heartbeat.write_text(f'{{"time": {time.time()}, "step": 3, "step_time": 0, "committed": -1}}')
    with pytest.raises(RunInUseError, match="the Slurm here does not know its job"):
        claim_attempt(start(run, job_id="8"))
    past = time.time() - FORGOTTEN_S - 1
    run.attempt(0).heartbeat.write_text(f'{{"time": {past}, "step": 3, "step_time": 0, "committed": -1}}')
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 1


def test_a_job_id_given_anew_by_a_new_cluster_holds_nothing(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    slurm.states = {"7": "RUNNING"}
    text = "JobId=7 JobName=x\n UserId=ada(1)\n JobState=RUNNING Reason=None\n Comment={}\n"
    other = parse_jobs(text.format(format_comment("/another/run")))[0]
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: other)
    with pytest.raises(RunInUseError, match="does not know its job"):
        claim_attempt(start(run, job_id="8"))
    claimed_before(run, 0, FORGOTTEN_S + 1)
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 1
    mine = parse_jobs(text.format(format_comment(str(run.path))))[0]
    slurm.states = {"8": "RUNNING"}
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: mine)
    with pytest.raises(RunInUseError):
        claim_attempt(start(run, job_id="9"))


def test_silence_decides_when_slurm_does_not(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    slurm.states = None
    with pytest.raises(RunInUseError, match="slurmctld is silent"):
        claim_attempt(start(run, job_id="8"))
    old = some_claim("x", time=time.time() - SILENT_S - 60)
    run.attempt(0).claim.write_bytes(claim_bytes(old))
    beat = f'{{"time": {time.time() - 5}, "step": 3, "step_time": 0, "committed": -1}}'
    run.attempt(0).heartbeat.write_text(beat)
    with pytest.raises(RunInUseError):
        claim_attempt(start(run, job_id="8"))
    run.attempt(0).heartbeat.unlink()
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 1


def test_the_same_job_id_on_another_cluster_is_another_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    assert read_claim(run.attempt(0)).cluster == "c@head"  # type: ignore[union-attr]
    slurm.settings = {**slurm.settings, "SlurmctldHost[0]": "another-head"}
    with pytest.raises(RunInUseError, match="another cluster"):
        claim_attempt(start(run))
    Ledger(run.ledger).append("decided", attempt=0, code=0, cause="stop", why="", requeue="none")
    assert claimed(claim_attempt(start(run))).attempt == 1


def test_a_restart_of_the_same_job_is_known_by_what_both_claims_know(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))

    def silent() -> dict[str, str]:
        raise SlurmError("slurmctld is silent")

    with monkeypatch.context() as patch:
        patch.setattr(query, "config", silent)
        second = claimed(claim_attempt(start(run, restart=1)))
    assert (second.claim.cluster, second.claim.means, second.claim.requeue) == ("c", "", None)
    assert "slurmctld is silent" in capsys.readouterr().err
    assert claimed(claim_attempt(start(run, restart=2))).attempt == 2


def test_the_claim_keeps_how_the_job_is_requeued(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "JobId=7 JobName=x\n UserId=ada(1)\n JobState=RUNNING Reason=None\n Requeue=0 Restarts=0\n"
    monkeypatch.setattr(query, "show_job", lambda job_id, **_: parse_jobs(text)[0])
    first = claimed(claim_attempt(start(RunDir(tmp_path / "a"))))
    assert (first.claim.means, first.claim.requeue) == ("exit-code", False)
    slurm.settings = {**slurm.settings, "RequeueExit": "(null)"}
    assert claimed(claim_attempt(start(RunDir(tmp_path / "b")))).claim.means == "scontrol"


def test_a_task_of_an_array_is_held_alone(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.hold_codes = frozenset()
    environ = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "1"}
    begun = start_from(environ, run_dir=str(tmp_path / "gone"), store=None, max_stalled=3)
    assert (begun.job_id, begun.label) == ("9", "9_1")
    assert held(claim_attempt(begun)).how == "scontrol"
    assert ["scontrol", "requeuehold", "9_1"] in slurm.asked
    assert not any("9" in argv or "JobId=9" in argv for argv in slurm.asked)


def test_an_owner_that_is_a_task_of_an_array_is_asked_about_alone(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    assert claimed(claim_attempt(start(run, job_id="9", task="9_1"))).claim.task == "9_1"
    slurm.states = {"9": "RUNNING", "9_1": "COMPLETED"}  # 9 is the whole array
    assert claimed(claim_attempt(start(run, job_id="10"))).attempt == 1
    slurm.states = {"10": "COMPLETED"}
    assert claimed(claim_attempt(start(run, job_id="9", task="9_1", restart=1))).attempt == 2
    slurm.states = {"9_1": "RUNNING"}
    with pytest.raises(RunInUseError) as error:
        claim_attempt(start(run, job_id="11"))
    assert "`scancel 9_1`" in (error.value.fix or "")


def test_a_new_run_directory_goes_on_behind_what_the_old_one_saved(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    (run.checkpoints / "000005-00001000").mkdir(parents=True)
    assert claimed(claim_attempt(start(run))).attempt == 6
    assert claimed(claim_attempt(start(run, restart=1))).attempt == 7


@pytest.mark.parametrize("torn", ["", '{"job_id": "7", ', '{"job_id": "7"}'])
def test_a_torn_claim_holds_the_job(tmp_path: Path, slurm: FakeSlurm, torn: str) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    run.attempt(0).claim.write_text(torn)
    outcome = held(claim_attempt(start(run, restart=1)))
    assert (outcome.rule, outcome.code) == ("claim-unreadable", 86)
    assert str(run.attempt(0).claim) in outcome.why
    assert "scontrol release 7" in outcome.advice("7", run)


def test_nodes_that_cannot_be_found_out_hold_the_job(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(nodelist: str, **_: float) -> tuple[str, ...]:
        raise SlurmError("`scontrol show hostnames b[1-2]` gave no answer in 30 s")

    monkeypatch.setattr(query, "hostnames", slow)
    outcome = held(claim_attempt(start(RunDir(tmp_path))))
    assert (outcome.rule, outcome.code) == ("slurm-silent", 86)
    assert "no answer in 30 s" in outcome.why


def test_one_slow_answer_costs_nothing(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def slow_once(nodelist: str, **_: float) -> tuple[str, ...]:
        tried.append(nodelist)
        if len(tried) == 1:
            raise SlurmError("`scontrol show hostnames b[1-2]` gave no answer in 30 s")
        return ("b1", "b2")

    def twice(call: Callable[[], object], **_: float) -> object:
        try:
            return call()
        except SlurmError:
            return call()

    monkeypatch.setattr(query, "hostnames", slow_once)
    monkeypatch.setattr(query, "patiently", twice)
    assert claimed(claim_attempt(start(RunDir(tmp_path), nodelist="b[1-2]"))).claim.nodes == ("b1", "b2")


@pytest.mark.parametrize("changes", [{"restart": 1}, {"job_id": "8"}])
def test_a_part_of_the_run_that_is_away_holds_the_job(
    tmp_path: Path, slurm: FakeSlurm, changes: dict[str, Any]
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to("/nonexistent/fsx2/checkpoints")
    slurm.states = {"7": "COMPLETED"}
    outcome = held(claim_attempt(start(run, **changes)))
    assert (outcome.rule, outcome.code) == ("run-unwritable", 86)
    assert "leads to no folder" in outcome.why


def test_a_folder_without_a_claim_counts_and_the_owner_before_it_is_asked(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    run.attempt(1).path.mkdir()
    slurm.states = {"7": "RUNNING"}
    with pytest.raises(RunInUseError):
        claim_attempt(start(run, job_id="8"))
    slurm.states = {"7": "COMPLETED"}
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 2


def test_my_own_nonce_is_mine(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempts.mkdir()
    assert publish(run.attempt(0), some_claim("mine"))
    assert publish(run.attempt(0), some_claim("mine"))
    assert not publish(run.attempt(0), some_claim("other"))
    assert sorted(path.name for path in run.attempts.iterdir()) == ["000000"]


def test_a_job_that_was_faster_is_asked_about_like_any_owner(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run, job_id="6"))
    monkeypatch.setattr(module, "_newest", lambda run: -1)  # listed before the other one claimed
    slurm.states = {"6": "RUNNING"}
    with pytest.raises(RunInUseError, match="held by job 6"):
        take(start(run), some_claim("mine"))
    slurm.states = {"6": "COMPLETED"}
    assert take(start(run), some_claim("mine")) == 1


def race(path: str, barrier: Any, results: Any, count: int, worker: int) -> None:
    run = RunDir(Path(path))
    for turn in range(count):
        barrier.wait()
        nonce = f"{worker}-{turn}"
        results.put((take(start(run), some_claim(nonce)), nonce))


def test_each_number_has_exactly_one_winner(tmp_path: Path) -> None:
    """Eight processes claim at once, ten times; all are of one job, so none gives up."""
    run = RunDir(tmp_path)
    run.attempts.mkdir()
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    workers = [context.Process(target=race, args=(str(tmp_path), barrier, results, 10, n)) for n in range(8)]
    for worker in workers:
        worker.start()
    won = [results.get(timeout=60) for _ in range(80)]
    for worker in workers:
        worker.join()
    assert sorted(number for number, _ in won) == list(range(80))
    for number, nonce in won:
        owner = read_claim(run.attempt(number))
        assert owner is not None
        assert owner.nonce == nonce
    assert run.attempt_numbers() == list(range(80))


def test_stalled_attempts_hold_the_job_by_exit_code(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    for restart in range(3):
        assert claimed(claim_attempt(start(run, restart=restart))).attempt == restart
    outcome = held(claim_attempt(start(run, restart=3)))
    assert (outcome.rule, outcome.code, outcome.how) == ("stalled", 86, "exit-code")
    assert run.attempt_numbers() == [0, 1, 2]
    assert Ledger(run.ledger).read()[-1].fields["rule"] == "stalled"
    assert not any("requeuehold" in argv for argv in slurm.asked)
    (update,) = [argv for argv in slurm.asked if "update" in argv]
    assert update[-1].startswith(f"Comment=pctool:{run.path} held: 3 attempts in a row")
    assert claimed(claim_attempt(start(run, restart=4))).attempt == 3  # the owner released it


def test_stalled_attempts_hold_the_job_by_scontrol(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.hold_codes = frozenset()
    run = RunDir(tmp_path)
    for restart in range(2):
        claim_attempt(start(run, restart=restart, max_stalled=2))
    outcome = held(claim_attempt(start(run, restart=2, max_stalled=2)))
    assert (outcome.code, outcome.how) == (86, "scontrol")
    assert ["scontrol", "requeuehold", "7"] in slurm.asked


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (BelowDurableError("checkpoint 000000-00000400 was complete, but none is there now"), "below-durable"),
        (ForeignCheckpointError("s3://b/gpt holds checkpoints of another run, /fsx/bob/gpt"), "foreign-checkpoints"),
        (StoreUnreadableError("stale file handle"), "store-unreadable"),
        (OSError(5, "Input/output error"), "store-unreadable"),
    ],
)
def test_a_checkpoint_that_cannot_be_had_holds_the_job(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, error: Exception, rule: str
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))

    def find_resume(run: RunDir, store: str | None) -> None:
        raise error

    monkeypatch.setattr(module, "find_resume", find_resume)
    outcome = held(claim_attempt(start(run, restart=1)))
    assert outcome.rule == rule
    assert Ledger(run.ledger).read()[-1].fields["why"] == outcome.why
    assert run.attempt_numbers() == [0]


def test_a_ledger_s_durable_step_that_is_gone_holds_the_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    Ledger(run.ledger).append(
        "committed", attempt=0, name="000000-00000400", step=400, bytes=1, seconds=1, tier="posix"
    )
    outcome = held(claim_attempt(start(run, restart=1)))
    assert outcome.rule == "below-durable"
    assert "000000-00000400" in outcome.why


def test_a_restart_without_its_run_directory_never_starts_at_0(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path / "unmounted")
    outcome = held(claim_attempt(start(run, restart=1)))
    assert outcome.rule == "run-missing"
    assert not run.path.exists()


def test_a_restart_without_its_ledger_never_starts_at_0(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    run.ledger.unlink()
    assert held(claim_attempt(start(run, restart=1))).rule == "run-missing"
    assert held(claim_attempt(start(run, job_id="8"))).rule == "run-missing"
    Ledger(run.ledger).append("accepted", step=0)
    slurm.states = {"7": "COMPLETED"}
    assert claimed(claim_attempt(start(run, job_id="8"))).attempt == 1


def test_a_full_disk_holds_the_job(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    claim_attempt(start(run))
    full = OSError(errno.ENOSPC, "No space left on device", str(run.attempts))

    def fail(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(module, "write_atomic", fail)
    monkeypatch.setattr(Ledger, "append", fail)
    outcome = held(claim_attempt(start(run, restart=1)))
    assert (outcome.rule, outcome.code) == ("run-unwritable", 86)
    assert "No space left on device" in outcome.why
    assert "scontrol release 7" in outcome.advice("7", run)
    assert run.attempt_numbers() == [0]
    assert "cannot be written" in capsys.readouterr().err


def test_a_silent_slurm_leaves_the_exit_code_to_hold_by(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> None:
        raise SlurmError("slurmctld is silent")

    monkeypatch.setattr(query, "requeue_exit_codes", silent)
    monkeypatch.setattr(query, "patiently", lambda call, **_: call())
    outcome = held(claim_attempt(start(RunDir(tmp_path), restart=1)))
    assert (outcome.rule, outcome.code, outcome.how) == ("run-missing", 86, "exit-code")
    assert not any("requeuehold" in argv for argv in slurm.asked)


def test_slurm_s_refusal_to_hold_is_an_error(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.hold_codes = frozenset()

    class Refused:
        code, stdout, stderr = 1, "", "Access/permission denied"

    monkeypatch.setattr(query, "ask", lambda argv, **_: Refused())
    with pytest.raises(SlurmError, match="Access/permission denied"):
        claim_attempt(start(RunDir(tmp_path / "gone"), restart=1))


def test_a_run_directory_that_cannot_be_made(tmp_path: Path, slurm: FakeSlurm) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        claim_attempt(start(RunDir(tmp_path / "file" / "run")))


def test_outside_a_job() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID"):
        start_from({}, run_dir="x", store=None, max_stalled=3)


def test_the_hub_falls_back_to_the_host_name(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., None] = lambda name, **_: None  # noqa: E731
    monkeypatch.setattr(query, "node_addr", find)
    monkeypatch.setattr(socket, "gethostname", lambda: "head")
    assert claimed(claim_attempt(start(RunDir(tmp_path / "r")))).claim.hub.startswith("head:")
