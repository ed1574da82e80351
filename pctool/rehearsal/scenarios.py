"""The scenarios: each injects faults at training steps and says what must hold besides the common checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pctool.errors import UsageError
from pctool.rehearsal.checks import (
    Check,
    cancelled_for_good,
    committed_before_deadline,
    ended_with_its_own_code,
    held_not_restarted,
    lost_a_node,
    mid_save_was_torn,
    one_attempt_a_restart,
    rejected_by_name,
    same_step_everywhere,
    save_was_slow,
    several_restarts,
    stopped_for,
)
from pctool.rehearsal.faults import arm_error, flip_byte, lower_time_limit, newest_data_file
from pctool.rehearsal.stage import Stage
from pctool.slurm.command import run as run_command
from pctool.slurm.private.client import Down


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
    """Stop one node's writers before a save begins, so that it cannot be over before the node dies in it."""
    stage.wait_step(stage.at(0.4, of_interval=0.5))
    victim = stage.nodes()[-1]
    with stage.frozen(stage.writers(victim)):
        stage.wait_saving()
        stage.kill(victim)


def _slow_saver(stage: Stage) -> None:
    """Freeze one node's writers in the save at the stop for longer than srun waits after the first exit."""
    stage.wait_step(stage.at(0.4))
    with stage.frozen(stage.writers(stage.nodes()[-1])):
        stage.notice(stage.nodes()[0])
        stage.wait_event("stop-step", 0)
        stage.wait_saving()
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


_LOSS_CHECKS = (lost_a_node,)
_STOP_CHECKS = (stopped_for("notice"), same_step_everywhere, committed_before_deadline)

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
            checks=(*_LOSS_CHECKS, mid_save_was_torn),
        ),
        Scenario(
            name="slow-saver",
            summary="one node needs longer for the save than srun --wait",
            inject=_slow_saver,
            checks=(*_STOP_CHECKS, save_was_slow),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="time-limit",
            summary="the time limit comes near",
            inject=_time_limit,
            checks=(stopped_for("time-limit"), same_step_everywhere, committed_before_deadline),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="program-error",
            summary="one rank raises an exception: no requeue",
            inject=_program_error,
            checks=(ended_with_its_own_code,),
            max_lost=_not_judged,
            survives=False,
            raises=True,
        ),
        Scenario(
            name="double-requeue",
            summary="several requeue requests at once, then one more",
            inject=_double_requeue,
            checks=(one_attempt_a_restart, several_restarts),
        ),
        Scenario(
            name="corrupt-newest",
            summary="the newest checkpoint has a flipped byte",
            inject=_corrupt_newest,
            checks=(rejected_by_name,),
        ),
        Scenario(
            name="store-missing-on-restart",
            summary="the checkpoints are not there at the restart: hold, not step 0",
            inject=_store_missing,
            checks=(held_not_restarted,),
            max_lost=_nothing_lost,
        ),
        Scenario(
            name="scancel",
            summary="plain scancel: no save, no requeue",
            inject=_scancel,
            checks=(cancelled_for_good,),
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
