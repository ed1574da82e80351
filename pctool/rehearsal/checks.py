"""What must hold after a scenario besides the common checks: that the fault had its effect, and did no harm."""

from __future__ import annotations

import math
from collections.abc import Callable

from pctool.rehearsal.observe import read_metrics
from pctool.rehearsal.stage import Stage
from pctool.rehearsal.verdict import Problem, find
from pctool.run.layout import RunDir
from pctool.run.ledger import Event
from pctool.run.records import read_node_exits

Check = Callable[[Stage, list[Event]], list[Problem]]


def same_step_everywhere(stage: Stage, events: list[Event]) -> list[Problem]:
    """Every rank's last step of attempt 0 is the agreed one, as far as the script logs its steps."""
    stop = find(events, "stop-step", attempt=0)
    if stop is None:
        return [Problem("the ranks never agreed on a step to stop at")]
    agreed = int(stop.fields["step"])
    expected = _last_logged(stage.baseline.run, up_to=agreed)
    got = _last_logged(stage.run)
    return [
        Problem(f"rank {rank} logged step {got.get(rank)} last, and should have come to {last}: agreed was {agreed}")
        for rank, last in expected.items()
        if got.get(rank) != last
    ]


def _last_logged(run: RunDir, *, up_to: float = math.inf) -> dict[int, int]:
    """Return the last step that each rank logged in attempt 0; a script may log every tenth step, or none."""
    logged = {rank: [int(line["step"]) for line in by.get(0, ())] for rank, by in read_metrics(run).items()}
    return {rank: max(done) for rank, steps in logged.items() if (done := [step for step in steps if step <= up_to])}


def committed_before_deadline(stage: Stage, events: list[Event]) -> list[Problem]:
    """The save at the stop is complete, and was before the notice's deadline."""
    stop = find(events, "stop-step", attempt=0)
    durable = stop and next(
        (e for e in events if e.event == "committed" and e.attempt == 0 and e.fields["step"] >= stop.fields["step"]),
        None,
    )
    if durable is None:
        return [Problem("the save at the stop is not complete", "deadline")]
    if stage.deadline and durable.time > stage.deadline:
        return [Problem(f"the save was complete {durable.time - stage.deadline:.1f} s after the deadline", "deadline")]
    return []


def stopped_for(why: str) -> Check:
    """Return the check that attempt 0 was asked to stop for this reason."""

    def check(stage: Stage, events: list[Event]) -> list[Problem]:
        event = find(events, "stop-requested", attempt=0)
        got = event.fields.get("why") if event else None
        return [] if got == why else [Problem(f"attempt 0 stopped for {got}, not for {why}")]

    return check


def rejected_by_name(stage: Stage, events: list[Event]) -> list[Problem]:
    """The damaged checkpoint is named, and another one was resumed."""
    rejected = find(events, "rejected")
    resumed = next((e for e in events if e.event == "resumed" and e.attempt), None)
    if rejected is None or resumed is None:
        return [Problem("the damaged checkpoint was not named, or nothing was resumed")]
    if rejected.fields["name"] == resumed.fields["name"]:
        return [Problem(f"{rejected.fields['name']} was resumed though it is damaged")]
    return []


def held_not_restarted(stage: Stage, events: list[Event]) -> list[Problem]:
    """The job was held, and no restart began at step 0."""
    held = find(events, "held")
    fresh = [e for e in events if e.event == "fresh" and e.attempt]
    problems = [] if held else [Problem("the job was not held")]
    return problems + [Problem("a restart began at step 0 though checkpoints are known") for _ in fresh]


def one_attempt_a_restart(stage: Stage, events: list[Event]) -> list[Problem]:
    """No restart of the job claimed two attempts."""
    restarts = [e.fields.get("restart") for e in events if e.event == "claim"]
    return [] if len(restarts) == len(set(restarts)) else [Problem(f"restarts {restarts} were claimed twice")]


def ended_with_its_own_code(stage: Stage, events: list[Event]) -> list[Problem]:
    """The job failed in its first attempt, with the code of the rank that failed."""
    info = stage.wait_end()
    decided = find(events, "decided", attempt=0)
    failed = [e for e in events if e.event == "node-exit" and e.fields.get("cause") == "program-error"]
    codes = {int(e.fields["code"]) for e in failed}
    problems = []
    if decided is None or decided.fields.get("code") not in codes or info.exit_code not in codes:
        problems.append(Problem(f"the job ended with code {info.exit_code}, the program with {sorted(codes)}"))
    if decided is None or decided.fields.get("cause") != "program-error":
        problems.append(Problem(f"decide did not see a program error: {decided.fields if decided else None}"))
    if info.state != "FAILED" or len(stage.run.attempt_numbers()) != 1:
        problems.append(Problem(f"the job is {info.state} after {len(stage.run.attempt_numbers())} attempts"))
    return problems


def cancelled_for_good(stage: Stage, events: list[Event]) -> list[Problem]:
    """The job is cancelled, was not started again, and saved nothing once it was."""
    info = stage.wait_end()
    problems = [] if info.state == "CANCELLED" else [Problem(f"the job is {info.state}, not CANCELLED")]
    if len(stage.run.attempt_numbers()) != 1:
        problems.append(Problem("a cancelled job was started again"))
    if find(events, "stop-requested"):
        problems.append(Problem("scancel was taken for a stop request"))
    if stage.cancelled is None or any(e.event == "committed" and e.time > stage.cancelled for e in events):
        problems.append(Problem("the job was not cancelled, or saved after that"))
    return problems


def lost_a_node(stage: Stage, events: list[Event]) -> list[Problem]:
    """A node went away in attempt 0, without a word, and another attempt trained on."""
    if stage.killed is None or stage.killed in read_node_exits(stage.run.attempt(0)):
        return [Problem(f"no node was lost: {stage.killed or 'none'} was to be, and left a record of its end")]
    decided = find(events, "decided", attempt=0)
    if decided is not None and decided.fields.get("cause") == "done":
        return [Problem("the job was done before the node was lost")]
    return [] if _worked(events) - {0} else [Problem("no attempt after the loss made a step")]


def _worked(events: list[Event]) -> set[int]:
    return {e.attempt for e in events if e.event == "first-step" and e.attempt is not None}


def several_restarts(stage: Stage, events: list[Event]) -> list[Problem]:
    """Three attempts at least made steps."""
    worked = _worked(events)
    return [] if len(worked) >= 3 else [Problem(f"attempts {sorted(worked)} made steps; two requeues make three")]


def mid_save_was_torn(stage: Stage, events: list[Event]) -> list[Problem]:
    """The save that the kill hit never became complete, and an older checkpoint was resumed."""
    seen = stage.watcher.attempts.get(0)
    due = (seen.last_step if seen else 0) // stage.baseline.every * stage.baseline.every
    committed = {int(e.fields["step"]) for e in events if e.event == "committed" and e.attempt == 0}
    resumed = next((e for e in events if e.event == "resumed" and e.attempt), None)
    if due == 0 or due in committed:
        return [Problem(f"the save at step {due} was complete before the node died: nothing was torn")]
    if resumed is None or int(resumed.fields["step"]) >= due:
        return [
            Problem(f"after a torn save at step {due} attempt 1 resumed {resumed.fields if resumed else 'nothing'}")
        ]
    return []


def save_was_slow(stage: Stage, events: list[Event]) -> list[Problem]:
    """The save at the stop took longer than srun waits after a first exit."""
    stop = find(events, "stop-step", attempt=0)
    durable = next((e for e in events if stop and e.event == "committed" and e.time >= stop.time), None)
    if stop is None or durable is None or durable.time - stop.time < stage.spec.wait:
        took = durable.time - stop.time if stop and durable else 0.0
        return [Problem(f"the save took {took:.1f} s, no longer than srun waits: the fault had no effect")]
    return []
