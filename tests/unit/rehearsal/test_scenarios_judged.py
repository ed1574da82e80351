"""What each scenario's verdict says of runs in which the fault had no effect, or a wrong one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pctool.errors import UsageError
from pctool.rehearsal import rehearse as module
from pctool.rehearsal.observe import Observed
from pctool.rehearsal.rehearse import _baseline, _judge, _play
from pctool.rehearsal.scenarios import SCENARIOS, choose
from pctool.run.layout import RunDir, checkpoint_name
from pctool.run.ledger import Event, Ledger

STEPS, EVERY, RANKS = 200, 50, 2


def write_attempt(run: RunDir, attempt: int, first: int, last: int, *, every: int = 1) -> None:
    """Write what an attempt that did these steps leaves: its events, and what its ranks logged."""
    ledger = Ledger(run.ledger)
    run.attempt(attempt).path.mkdir(parents=True)
    run.logs(attempt).mkdir(parents=True)
    ledger.append("claim", attempt=attempt, job_id="7", restart=attempt, nodes=["n1", "n2"], host="n1")
    if first == 1:
        ledger.append("fresh", attempt=attempt)
    else:
        ledger.append("resumed", attempt=attempt, name=checkpoint_name(0, first - 1), step=first - 1, tier="posix")
    ledger.append("first-step", attempt=attempt, step=first)
    for rank in range(RANKS):
        steps = [step for step in range(first, last + 1) if step % every == 0]
        lines = [json.dumps({"step": step, "loss": 1 / step, "samples": [step]}) + "\n" for step in steps]
        (run.logs(attempt) / f"metrics-rank{rank}.jsonl").write_text("".join(lines))


def commit(run: RunDir, attempt: int, *steps: int) -> None:
    for step in steps:
        name = checkpoint_name(attempt, step)
        Ledger(run.ledger).append("committed", attempt=attempt, name=name, step=step, tier="posix")


def write_baseline(folder: Path, *, every: int = 1, until: int = STEPS) -> RunDir:
    run = RunDir(folder)
    write_attempt(run, 0, 1, until, every=every)
    commit(run, 0, *sorted({*range(EVERY, until + 1, EVERY), until}))
    Ledger(run.ledger).append("decided", attempt=0, code=0, cause="done", why="", requeue="none")
    return run


def stage_of(run: RunDir, baseline: RunDir, seen: dict[int, Observed], **more: Any) -> Any:
    values = {
        "run": run, "baseline": _baseline(baseline, Ledger(baseline.ledger).read()), "ledger": Ledger(run.ledger),
        "noticed": None, "deadline": None, "ended": {}, "killed": None, "cancelled": None, "fault_folder": None,
        "spec": SimpleNamespace(wait=6),
        "watcher": SimpleNamespace(attempts=seen, check=lambda: None),
        "wait_end": lambda: SimpleNamespace(state="COMPLETED", exit_code=0),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more})


def verdict(name: str, stage: Any) -> Any:
    quiet = dataclasses.replace(SCENARIOS[name], inject=lambda stage: None)
    return _judge(stage, quiet, _play(stage, quiet))


@pytest.fixture(autouse=True)
def equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compare_weights", lambda stage: (True, []))


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_scenario_passes_where_nothing_happened(name: str, tmp_path: Path) -> None:
    run = write_baseline(tmp_path / "run")
    seen = {0: Observed(first_step=1, last_step=STEPS)}
    found = verdict(name, stage_of(run, run, seen))
    assert not found.passed
    assert found.why


def loss(tmp_path: Path, *, resumed: int, saved: tuple[int, ...] = (50,), last: int = 80) -> tuple[RunDir, RunDir, Any]:
    baseline = write_baseline(tmp_path / "baseline")
    run = RunDir(tmp_path / "run")
    write_attempt(run, 0, 1, last)
    commit(run, 0, *saved)
    write_attempt(run, 1, resumed + 1, STEPS)
    commit(run, 1, STEPS)
    seen = {0: Observed(first_step=1, last_step=last), 1: Observed(first_step=resumed + 1, last_step=STEPS)}
    return run, baseline, seen


def test_a_loss_that_costs_less_than_an_interval_passes(tmp_path: Path) -> None:
    run, baseline, seen = loss(tmp_path, resumed=50)
    found = verdict("loss-soon", stage_of(run, baseline, seen, killed="n2"))
    assert found.passed, found.why
    assert found.steps_lost == 30


def test_a_node_that_wrote_its_end_was_not_lost(tmp_path: Path) -> None:
    run, baseline, seen = loss(tmp_path, resumed=50)
    run.attempt(0).nodes.mkdir()
    record = {"node": "n2", "cause": "peer-lost", "code": 1, "time": 1.0, "saved": False, "why": ""}
    (run.attempt(0).nodes / "n2.exit").write_text(json.dumps(record))
    assert "no node was lost" in verdict("loss-soon", stage_of(run, baseline, seen, killed="n2")).why


def test_a_torn_save_costs_the_interval_and_never_the_whole_run(tmp_path: Path) -> None:
    run, baseline, seen = loss(tmp_path, resumed=50, last=100)
    found = verdict("loss-mid-save", stage_of(run, baseline, seen, killed="n2"))
    assert found.passed, found.why
    assert found.steps_lost == 50


def test_a_save_that_was_complete_was_not_torn(tmp_path: Path) -> None:
    run, baseline, seen = loss(tmp_path, resumed=100, saved=(50, 100), last=100)
    assert "nothing was torn" in verdict("loss-mid-save", stage_of(run, baseline, seen, killed="n2")).why


def test_a_start_at_step_0_though_a_checkpoint_was_there_fails(tmp_path: Path) -> None:
    run, baseline, seen = loss(tmp_path, resumed=0, last=55)
    found = verdict("loss-soon", stage_of(run, baseline, seen, killed="n2"))
    assert "began at step 0 though 000000-00000050 was complete" in found.why


def test_what_nobody_saw_is_not_nothing_lost(tmp_path: Path) -> None:
    run, baseline, _ = loss(tmp_path, resumed=50)
    for rank in range(RANKS):
        (run.logs(0) / f"metrics-rank{rank}.jsonl").unlink()
    found = verdict("loss-soon", stage_of(run, baseline, {}, killed="n2"))
    assert "how far attempt 0 came was not seen" in found.why


def test_the_interval_is_that_of_the_job_where_the_end_is_no_multiple_of_it(tmp_path: Path) -> None:
    run = write_baseline(tmp_path / "run", until=205)
    assert _baseline(run, Ledger(run.ledger).read()).every == EVERY


def test_a_script_that_logs_every_tenth_step_agrees(tmp_path: Path) -> None:
    baseline = write_baseline(tmp_path / "baseline", every=10)
    run = RunDir(tmp_path / "run")
    write_attempt(run, 0, 1, 75, every=10)
    Ledger(run.ledger).append("stop-step", attempt=0, step=75)
    check = SCENARIOS["notice"].checks[1]
    assert check(stage_of(run, baseline, {}), []) != []  # no agreement is in these events
    events = [Event(time=1.0, attempt=0, event="stop-step", fields={"step": 75})]
    assert check(stage_of(run, baseline, {}), events) == []
    events = [Event(time=1.0, attempt=0, event="stop-step", fields={"step": 85})]
    assert "logged step 70 last, and should have come to 80" in check(stage_of(run, baseline, {}), events)[0].what


def test_scenarios_that_take_more_nodes() -> None:
    assert "notice-two" not in [scenario.name for scenario in choose([], nodes=1)]
    assert "notice-two" in [scenario.name for scenario in choose([], nodes=2)]
    with pytest.raises(UsageError, match="takes 2 nodes"):
        choose(["notice-two"], nodes=1)
