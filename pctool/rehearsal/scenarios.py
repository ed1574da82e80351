"""The scenarios: each injects faults at training steps and says what must hold besides the common checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pctool.errors import UsageError
from pctool.rehearsal.faults import arm_error, flip_byte, lower_time_limit, newest_data_file
from pctool.rehearsal.observe import read_metrics
from pctool.rehearsal.stage import Stage
from pctool.rehearsal.verdict import Problem, find
from pctool.run.layout import parse_checkpoint_name
from pctool.run.ledger import Event
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
    stage.wait_step(stage.at(0.4, of_interval=0.9))
    stage.wait_saving()
    stage.kill(stage.nodes()[-1])


def _slow_saver(stage: Stage) -> None:
    """Freeze one node's ranks in the save at the stop for longer than srun waits after the first exit."""
    stage.wait_step(stage.at(0.4))
    victim = stage.nodes()[-1]
    stage.notice(stage.nodes()[0])
    stage.wait_event("stop-step", 0)
    stage.wait_saving()
    stage.freeze(victim, stage.spec.wait * 1.2)


def _time_limit(stage: Stage) -> None:
    """Lower the limit and stop the clock of the training, not of Slurm, until its signal comes."""
    stage.wait_step(stage.at(0.4))
    lower_time_limit(stage.job_id)
    with stage.frozen(*stage.nodes()):
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
    run_command(["scancel", stage.job_id])


# checks


def _same_step_everywhere(stage: Stage, events: list[Event]) -> list[Problem]:
    """Every rank's last step of attempt 0 is the agreed one."""
    stop = find(events, "stop-step", attempt=0)
    if stop is None:
        return [Problem("the ranks never agreed on a step to stop at")]
    agreed = int(stop.fields["step"])
    lasts = {rank: attempts[0][-1]["step"] for rank, attempts in read_metrics(stage.run).items() if attempts[0]}
    return [
        Problem(f"rank {rank} stopped at step {last}, agreed was {agreed}")
        for rank, last in lasts.items()
        if last != agreed
    ]


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
    problems = []
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
    return problems


def _mid_save_was_torn(stage: Stage, events: list[Event]) -> list[Problem]:
    """The kill hit a save: a folder of attempt 0 has no manifest, and it was not resumed."""
    torn = [
        path.name
        for path in stage.run.checkpoints.iterdir()
        if (key := parse_checkpoint_name(path.name)) and key[0] == 0 and not (path / "MANIFEST").exists()
    ]
    resumed = {e.fields["name"] for e in events if e.event == "resumed"}
    return [Problem(f"{name} has no manifest and was resumed") for name in torn if name in resumed]


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
        ),
        Scenario(name="loss-soon", summary="a node dies, set DOWN 20 s later", inject=_loss(20.0)),
        Scenario(name="loss-late", summary="a node dies, set DOWN 120 s later", inject=_loss(120.0)),
        Scenario(name="loss-never", summary="a node dies, nobody sets it DOWN but Slurm", inject=_loss(None)),
        Scenario(name="loss-batch-host", summary="the batch script's node dies", inject=_loss(20.0, victim=0)),
        Scenario(
            name="loss-mid-save",
            summary="a node dies in the middle of a save",
            inject=_loss_mid_save,
            checks=(_mid_save_was_torn,),
            max_lost=lambda stage: 2 * stage.baseline.every,
        ),
        Scenario(
            name="slow-saver",
            summary="one node needs longer for the save than srun --wait",
            inject=_slow_saver,
            checks=_STOP_CHECKS,
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
            checks=(_one_attempt_a_restart,),
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


def choose(names: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of these names, all of them for none; raise UsageError for an unknown one."""
    import difflib

    wanted = [name for given in names for name in GROUPS.get(given, (given,))] or list(SCENARIOS)
    for name in wanted:
        if name not in SCENARIOS:
            near = difflib.get_close_matches(name, [*SCENARIOS, *GROUPS], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose of: {', '.join([*SCENARIOS, *GROUPS])}"
            raise UsageError(f"no scenario {name!r}", fix=hint)
    return [SCENARIOS[name] for name in dict.fromkeys(wanted)]
