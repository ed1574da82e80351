"""What the two state machines of a launch ask for. Executed in one place, pctool.node.launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pctool.node.wire import Message


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The bounds of every wait of a gang, in seconds. None is scaled: they bound processes, not Slurm."""

    gather_s: float = 300.0  # until every launch is there; srun starts them together, a cold file system is slow
    standing_s: float = 30.0  # for the rest of the gang, once a node with a standing notice is known
    rejoin_s: float = 20.0  # for a launch that lost its connection before it was ready
    rendezvous_s: float = 10.0  # for node 0's failed bind, when another node's torchrun failed first
    grace_s: float = 5.0  # from a known loss until the ranks that hang in a collective are ended
    save_grace_s: float = 10.0  # the same while the ranks save
    write_s: float = 120.0  # from the end of all ranks until what they had copied must be written
    straggler_s: float = 20.0  # for a node's torchrun to end after the commit: only teardown is left
    overdue_s: float = 30.0  # past the deadline of a notice; a time limit's is Slurm's own, and nothing is past it
    margin_s: float = 5.0  # before the deadline: release, so that the batch script can still decide
    mirror_s: float = 600.0  # for the mirror at the end, where no deadline is known
    mirror_failed_s: float = 120.0  # the same after a program error
    mirror_lost_s: float = 10.0  # the same after a loss: the next attempt mirrors first
    refuse_s: float = 15.0  # for the hub to hear of a node that cannot take part
    kill_s: float = 5.0  # from SIGTERM to SIGKILL for ranks


@dataclass(frozen=True)
class Say:
    """Print and log a line."""

    text: str


@dataclass(frozen=True)
class Tell:
    """Send a message: the coordinator's go to every launch, a member's to the hub."""

    message: Message


@dataclass(frozen=True)
class Enter:
    """Append an event to the ledger (coordinator)."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """Allow the leading rank to publish the step to stop at (coordinator)."""


@dataclass(frozen=True)
class AskLimit:
    """Ask Slurm when it ends the job, and tell Gang.limit (coordinator)."""


@dataclass(frozen=True)
class FinishMirror:
    """Tell the mirror to finish by `deadline` (seconds since the epoch, 0: none) (coordinator)."""

    deadline: float


@dataclass(frozen=True)
class StartRanks:
    """Start torchrun (member). A torchrun of an earlier `try_` is ended first."""

    try_: int
    address: str
    port: int


@dataclass(frozen=True)
class RequestStop:
    """Set the flag of the page, and pass the stop signal to ranks that are to get one (member)."""

    reason: str
    deadline: float


@dataclass(frozen=True)
class EndRanks:
    """End the ranks: SIGTERM, and SIGKILL after Timing.kill_s (member)."""


@dataclass(frozen=True)
class Record:
    """Write this node's record (member)."""

    cause: str
    code: int
    why: str
    saved: bool


@dataclass(frozen=True)
class RecordFor:
    """Write the record of a node that cannot see the run directory (coordinator)."""

    node: str
    record: Record


@dataclass(frozen=True)
class Exit:
    """End this launch (member)."""

    code: int


Action = (
    Say | Tell | Enter | Arm | AskLimit | FinishMirror | StartRanks | RequestStop | EndRanks | Record | RecordFor | Exit
)
