"""Accept, knowingly, that a run goes on from a lower step than its highest durable one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pctool.checkpoint.lineage import Candidate, candidates, durable
from pctool.checkpoint.stores import open_stores, order
from pctool.errors import NotFoundError, SlurmError, UsageError
from pctool.job.find import Found, at_work
from pctool.job.heartbeat import SILENT_S, last_sign_of_life
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.records import read_claim
from pctool.slurm.states import Phase, is_ended, phase


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The step that was accepted, the checkpoint the run goes on from (None: step 0), and how to let it start.

    `left` are the newer durable checkpoints that it turns away from, oldest first.
    """

    step: int
    name: str | None
    left: tuple[str, ...]
    how: str


def accept(found: Found, *, step: int, store: str | None) -> Accepted:
    """Write to the ledger that the run may go on from `step`, and say how to let it start.

    Raises UsageError while the job, or a later one, runs (the ledger has one writer), SlurmError where Slurm does not
    say whether it does and it was heard of lately, NotFoundError where no complete checkpoint is at that step; 0 needs
    none. Errors of a tier that cannot be read are raised as they are.
    """
    worker = at_work(found)
    for one in (found, worker):
        _refuse_if_running(one)
    there = list(candidates(open_stores(found.run, store), Ledger(found.run.ledger).read()))
    chosen = _complete_at(found, step, there) if step > 0 else None
    name = chosen.name if chosen else None
    found.run.path.mkdir(parents=True, exist_ok=True)
    known = durable(Ledger(found.run.ledger).read())
    left = tuple(sorted((newer for newer in known if name is None or order(newer) > order(name)), key=order))
    newest = max((one.attempt for one in there), default=0)
    saved_by = chosen.manifest.run if chosen and chosen.manifest else None
    Ledger(found.run.ledger).append("accepted", step=step, name=name, run=saved_by, newest=newest)
    over = found.job is None or is_ended(found.job.state)
    return Accepted(step=step, name=name, left=left, how=_how(worker if over else found))


def _refuse_if_running(found: Found) -> None:
    if found.slurm_silent and _heard_of(found.run):
        raise SlurmError(
            f"job {found.job_id} may be running: Slurm could not be asked: {found.slurm_silent}",
            where=str(found.run.path),
            fix="try again once `scontrol ping` finds slurmctld up",
        )
    if found.job is not None and phase(found.job.state) in {Phase.RUNNING, Phase.COMPLETING}:
        raise UsageError(
            f"job {found.job.label} is {found.job.state}",
            where=str(found.run.path),
            fix=f"end it first with `pctool stop {found.job.label}`",
        )


def _heard_of(run: RunDir) -> bool:
    for number in run.attempt_numbers()[-1:]:
        claim = read_claim(run.attempt(number))
        if claim is not None:
            return time.time() - last_sign_of_life(run.attempt(number), claim) <= SILENT_S
    return False


def _complete_at(found: Found, step: int, there: Sequence[Candidate]) -> Candidate:
    complete = [one for one in there if one.tiers]
    chosen = next((one for one in complete if one.step == step), None)
    if chosen is None:
        steps = ", ".join(str(one.step) for one in complete) or "none"
        raise NotFoundError(
            f"no complete checkpoint is at step {step}",
            where=str(found.run.checkpoints),
            fix=f"choose one of the steps that are there ({steps}), or 0 for a new start",
        )
    return chosen


def _how(found: Found) -> str:
    if found.job is None or is_ended(found.job.state):
        return f"submit the job again with --run-dir {found.run.path}"
    if found.job.held:
        return f"let it start with `scontrol release {found.job.label}`"
    return f"job {found.job.label} starts by itself"
