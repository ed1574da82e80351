"""Every state Slurm gives a job, and the four phases that pctool tells apart."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where in its life a job is. Only ENDED is final: a completing job may be requeued."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"


# Source: slurm.h, enum job_states and the JOB_* state flags, as job_state_string() prints them; 22.05 to 26.05.
PHASES: dict[str, Phase] = {
    "PENDING": Phase.PENDING,
    "REQUEUED": Phase.PENDING,
    "REQUEUE_FED": Phase.PENDING,
    "REQUEUE_HOLD": Phase.PENDING,
    "RESV_DEL_HOLD": Phase.PENDING,
    "SPECIAL_EXIT": Phase.PENDING,  # requeued and held: what RequeueExitHold does
    "EXPEDITING": Phase.PENDING,  # since 25.11: --requeue=expedite, waiting to start again
    "CONFIGURING": Phase.RUNNING,  # nodes are given, some still boot
    "POWER_UP_NODE": Phase.RUNNING,
    "RUNNING": Phase.RUNNING,
    "RESIZING": Phase.RUNNING,
    "SIGNALING": Phase.RUNNING,
    "STOPPED": Phase.RUNNING,
    "SUSPENDED": Phase.RUNNING,
    "UPDATE_DB": Phase.RUNNING,
    "COMPLETING": Phase.COMPLETING,
    "STAGE_OUT": Phase.COMPLETING,
    "COMPLETED": Phase.ENDED,
    "CANCELLED": Phase.ENDED,
    "FAILED": Phase.ENDED,
    "TIMEOUT": Phase.ENDED,
    "NODE_FAIL": Phase.ENDED,
    "PREEMPTED": Phase.ENDED,
    "BOOT_FAIL": Phase.ENDED,
    "DEADLINE": Phase.ENDED,
    "OUT_OF_MEMORY": Phase.ENDED,
    "LAUNCH_FAILED": Phase.ENDED,
    "RECONFIG_FAIL": Phase.ENDED,
    "REVOKED": Phase.ENDED,
}


def phase(state: str) -> Phase:
    """Return the phase of a state as squeue or scontrol prints it ('CANCELLED by 0' too).

    A state nobody knows counts as RUNNING: treating a live job as gone could lose a run, the opposite only waits.
    """
    words = state.split()
    return PHASES.get(words[0].rstrip("+").upper(), Phase.RUNNING) if words else Phase.RUNNING


def is_ended(state: str) -> bool:
    """Return whether a job in this state is over for good."""
    return phase(state) is Phase.ENDED
