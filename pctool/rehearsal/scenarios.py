"""The scenarios: each injects faults at training steps and says what must hold besides the common checks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pctool.errors import UsageError
from pctool.rehearsal.faults import arm_error, flip_byte, lower_time_limit, newest_data_file
from pctool.rehearsal.observe import read_metrics
from pctool.rehearsal.stage import Stage
from pctool.rehearsal.verdict import Problem, find
from pctool.run.layout import RunDir
from pctool.run.ledger import Event
from pctool.run.records import read_node_exits
from pctool.slurm.command import run as run_command
from pctool.slurm.private.client import Down

Check = Callable[[Stage, list[Event]], list[Problem]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One rehearsal. `inject` runs while the job runs; `checks` run after it ended."""

    name: str
    summary: str
    inject: Callable[[Stage], None]
    checks: tuple[Check, ...] = ()
    max_lost: Callable[[Stage], int | None] = lambda stage: stage.baseline.every
    survives: bool = True  # the run is finished in the end, equal to the baseline
    raises: bool = False  # an exception is prepared in the last rank's interpreter
    min_nodes: int = 1


def _nothing_lost(stage: Stage) -> int:
    return 0


def _not_judged(stage: Stage) -> None:
    return None


# injections


def _notice(stage: Stage) -> None:
    stage.wait_step(stage.at(0.4))
    stage.notice(stage.nodes()[-1])


def _notice_two(stage: Stage) -> None:
    step = stage.at(0.4)
    stage.wait_step(step)
    first, *_, last = stage.nodes()
    stage.notice(last)
    stage.wait_step(step + 2)
    stage.notice(first)


def _loss(down_after: Down, *, victim: int = -1) -> Callable[[Stage], None]:
    def inject(stage: Stage) -> None:
        stage.wait_step(stage.at(0.4))
        stage.kill(stage.nodes()[victim], down_after=down_after)

    return inject


def _loss_mid_save(stage: Stage) -> None:
    """Stop one node's ranks as soon as a save begins, so that it cannot be over before the node dies."""
    stage.wait_step(stage.at(0.4, of_interval=0.9))
    victim = stage.nodes()[-1]
    pids = stage.ranks(victim)
    stage.wait_saving()
    with stage.frozen(pids):
        stage.kill(victim)


def _slow_saver(stage: Stage) -> None:
    """Freeze one node's ranks in the save at the stop for longer than srun waits after the first exit."""
    stage.wait_step(stage.at(0.4))
    pids = stage.ranks(stage.nodes()[-1])
    stage.notice(stage.nodes()[0])
    stage.wait_event("stop-step", 0)
    stage.wait_saving()
    with stage.frozen(pids):
        time.sleep(stage.spec.wait * 1.2)  # the fault is its duration


def _time_limit(stage: Stage) -> None:
    """Lower the limit and stop the clock of the training, not of Slurm, until its signal comes."""
    stage.wait_step(stage.at(0.4))
    lower_time_limit(stage.job_id)
    with stage.frozen(stage.ranks(*stage.nodes())):
        stage.wait_event("stop-requested", 0)
    stage.wait_job(lambda info: info.state == "PENDING", "the requeue")
    stage.scontrol("update", f"JobId={stage.job_id}", "TimeLimit=UNLIMITED")


def _program_error(stage: Stage) -> None:
    stage.wait_step(stage.at(0.4))
    assert stage.fault_folder is not None  # set for every scenario with `raises`
    arm_error(stage.fault_folder)


def _double_requeue(stage: Stage) -> None:
    """Requeue requests that meet: ours by exit code, an operator's at the same moment, and one more when pending."""
    stage.wait_step(stage.at(0.3))
    stage.notice(stage.nodes()[-1])
    stop = stage.wait_event("stop-step", 0)
    stage.wait_event("committed", 0, step=stop.fields["step"])
    stage.scontrol("requeue", stage.job_id, check=False)  # may come before, at, or after our own requeue
    stage.wait_job(lambda info: info.state == "PENDING", "the requeue")
    stage.scontrol("requeue", stage.job_id, check=False)
    restarted = stage.wait_event("first-step", after_attempt=0)
    stage.wait_step(stage.at(0.7), restarted.attempt or 0)
    stage.scontrol("requeue", stage.job_id)


def _corrupt_newest(stage: Stage) -> None:
    stage.need_checkpoint_before(stage.at(0.5))
    stage.wait_step(stage.at(0.5))
    stage.notice(stage.nodes()[-1])
    stage.wait_event("decided", 0)
    flip_byte(newest_data_file(stage.run))


def _store_missing(stage: Stage) -> None:
    stage.wait_step(stage.at(0.4))
    stage.notice(stage.nodes()[-1])
    stage.wait_event("decided", 0)
    hidden = stage.run.path / "checkpoints-elsewhere"
    stage.run.checkpoints.rename(hidden)
    stage.wait_event("held")
    stage.wait_job(lambda info: info.state != "RUNNING" and info.held, "the hold")
    if stage.run.checkpoints.exists():
        stage.run.checkpoints.rmdir()  # an empty one: restore would have been from nothing
    hidden.rename(stage.run.checkpoints)
    stage.scontrol("release", stage.job_id)


def _scancel(stage: Stage) -> None:
    stage.wait_step(stage.at(0.4))
    stage.cancelled = time.time()
    run_command(["scancel", stage.job_id])


# checks


def _same_step_everywhere(stage: Stage, events: list[Event]) -> list[Problem]:
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


def _committed_before_deadline(stage: Stage, events: list[Event]) -> list[Problem]:
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


def _stopped_for(why: str) -> Check:
    def check(stage: Stage, events: list[Event]) -> list[Problem]:
        event = find(events, "stop-requested", attempt=0)
        got = event.fields.get("why") if event else None
        return [] if got == why else [Problem(f"attempt 0 stopped for {got}, not for {why}")]

    return check


def _rejected_by_name(stage: Stage, events: list[Event]) -> list[Problem]:
    rejected = find(events, "rejected")
    resumed = next((e for e in events if e.event == "resumed" and e.attempt), None)
    if rejected is None or resumed is None:
        return [Problem("the damaged checkpoint was not named, or nothing was resumed")]
    if rejected.fields["name"] == resumed.fields["name"]:
        return [Problem(f"{rejected.fields['name']} was resumed though it is damaged")]
    return []


def _held_not_restarted(stage: Stage, events: list[Event]) -> list[Problem]:
    held = find(events, "held")
    fresh = [e for e in events if e.event == "fresh" and e.attempt]
    problems = [] if held else [Problem("the job was not held")]
    return problems + [Problem("a restart began at step 0 though checkpoints are known") for _ in fresh]


def _one_attempt_a_restart(stage: Stage, events: list[Event]) -> list[Problem]:
    restarts = [e.fields.get("restart") for e in events if e.event == "claim"]
    return [] if len(restarts) == len(set(restarts)) else [Problem(f"restarts {restarts} were claimed twice")]


def _ended_with_its_own_code(stage: Stage, events: list[Event]) -> list[Problem]:
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


def _cancelled_for_good(stage: Stage, events: list[Event]) -> list[Problem]:
    info = stage.wait_end()
    problems = [] if info.state == "CANCELLED" else [Problem(f"the job is {info.state}, not CANCELLED")]
    if len(stage.run.attempt_numbers()) != 1:
        problems.append(Problem("a cancelled job was started again"))
    if find(events, "stop-requested"):
        problems.append(Problem("scancel was taken for a stop request"))
    if stage.cancelled is None or any(e.event == "committed" and e.time > stage.cancelled for e in events):
        problems.append(Problem("the job was not cancelled, or saved after that"))
    return problems


def _lost_a_node(stage: Stage, events: list[Event]) -> list[Problem]:
    """A node went away in attempt 0, without a word, and another attempt trained on."""
    if stage.killed is None or stage.killed in read_node_exits(stage.run.attempt(0)):
        return [Problem(f"no node was lost: {stage.killed or 'none'} was to be, and left a record of its end")]
    decided = find(events, "decided", attempt=0)
    if decided is not None and decided.fields.get("cause") == "done":
        return [Problem("the job was done before the node was lost")]
    return [] if _worked(events) - {0} else [Problem("no attempt after the loss made a step")]


def _worked(events: list[Event]) -> set[int]:
    return {e.attempt for e in events if e.event == "first-step" and e.attempt is not None}


def _several_restarts(stage: Stage, events: list[Event]) -> list[Problem]:
    worked = _worked(events)
    return [] if len(worked) >= 3 else [Problem(f"attempts {sorted(worked)} made steps; two requeues make three")]


def _mid_save_was_torn(stage: Stage, events: list[Event]) -> list[Problem]:
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


def _save_was_slow(stage: Stage, events: list[Event]) -> list[Problem]:
    stop = find(events, "stop-step", attempt=0)
    durable = next((e for e in events if stop and e.event == "committed" and e.time >= stop.time), None)
    if stop is None or durable is None or durable.time - stop.time < stage.spec.wait:
        took = durable.time - stop.time if stop and durable else 0.0
        return [Problem(f"the save took {took:.1f} s, no longer than srun waits: the fault had no effect")]
    return []


_LOSS_CHECKS = (_lost_a_node,)
_STOP_CHECKS = (_stopped_for("notice"), _same_step_everywhere, _committed_before_deadline)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="notice",
            summary="one node gets a spot notice and dies",
            inject=_notice,
            checks=_STOP_CHECKS,
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="notice-two",
            summary="two nodes get notices at different times",
            inject=_notice_two,
            checks=_STOP_CHECKS,
            max_lost=_nothing_lost,
            min_nodes=2,
        ),
        Scenario(name="loss-soon", summary="a node dies, set DOWN 20 s later", inject=_loss(20.0), checks=_LOSS_CHECKS),
        Scenario(
            name="loss-late", summary="a node dies, set DOWN 120 s later", inject=_loss(120.0), checks=_LOSS_CHECKS
        ),
        Scenario(
            name="loss-never",
            summary="a node dies, nobody sets it DOWN but Slurm",
            inject=_loss(None),
            checks=_LOSS_CHECKS,
        ),
        Scenario(
            name="loss-batch-host",
            summary="the batch script's node dies",
            inject=_loss(20.0, victim=0),
            checks=_LOSS_CHECKS,
        ),
        Scenario(
            name="loss-mid-save",
            summary="a node dies in the middle of a save",
            inject=_loss_mid_save,
            checks=(*_LOSS_CHECKS, _mid_save_was_torn),
        ),
        Scenario(
            name="slow-saver",
            summary="one node needs longer for the save than srun --wait",
            inject=_slow_saver,
            checks=(*_STOP_CHECKS, _save_was_slow),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="time-limit",
            summary="the time limit comes near",
            inject=_time_limit,
            checks=(_stopped_for("time-limit"), _same_step_everywhere, _committed_before_deadline),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="program-error",
            summary="one rank raises an exception: no requeue",
            inject=_program_error,
            checks=(_ended_with_its_own_code,),
            max_lost=_not_judged,
            survives=False,
            raises=True,
        ),
        Scenario(
            name="double-requeue",
            summary="several requeue requests at once, then one more",
            inject=_double_requeue,
            checks=(_one_attempt_a_restart, _several_restarts),
        ),
        Scenario(
            name="corrupt-newest",
            summary="the newest checkpoint has a flipped byte",
            inject=_corrupt_newest,
            checks=(_rejected_by_name,),
        ),
        Scenario(
            name="store-missing-on-restart",
            summary="the checkpoints are not there at the restart: hold, not step 0",
            inject=_store_missing,
            checks=(_held_not_restarted,),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="scancel",
            summary="plain scancel: no save, no requeue",
            inject=_scancel,
            checks=(_cancelled_for_good,),
            max_lost=_not_judged,
            survives=False,
        ),
    )
}

GROUPS = {"loss": ("loss-soon", "loss-late", "loss-never")}


def choose(names: Sequence[str], *, nodes: int) -> list[Scenario]:
    """Return the scenarios of these names, for none all that a job of so many nodes can have.

    Raises UsageError for an unknown name, or one that takes more nodes.
    """
    import difflib

    wanted = [name for given in names for name in GROUPS.get(given, (given,))] or list(SCENARIOS)
    for name in wanted:
        if name not in SCENARIOS:
            near = difflib.get_close_matches(name, [*SCENARIOS, *GROUPS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose of: {', '.join([*SCENARIOS, *GROUPS])}"
            raise UsageError(f"no scenario {name!r}", fix=hint)
    chosen = [SCENARIOS[name] for name in dict.fromkeys(wanted)]
    small = [scenario for scenario in chosen if scenario.min_nodes > nodes]
    if small and names:
        raise UsageError(
            f"scenario {small[0].name} takes {small[0].min_nodes} nodes, and the job has {nodes}",
            fix=f"use -N {small[0].min_nodes} or more, or leave it out",
        )
    return [scenario for scenario in chosen if scenario not in small]
