"""Read the heartbeat that launch on node 0 rewrites every five seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pctool.run.layout import AttemptDir
from pctool.run.records import Claim

SILENT_S = 600.0  # an owner that Slurm cannot be asked about counts as gone after this long without a heartbeat (5 s)
# An owner whose id Slurm does not know has ended at least MinJobAge ago (300 s), if it ran here; or it lives on another
# cluster. Its heartbeat tells: NFS may show it 60 s late.
FORGOTTEN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """How far an attempt was at `time`. Times are seconds since the epoch, 0 where there is none yet; steps -1."""

    time: float
    step: int
    step_time: float
    committed: int
    saving_since: float


def read_heartbeat(attempt: AttemptDir) -> Heartbeat | None:
    """Return the heartbeat, or None before the first one (or for one that cannot be read)."""
    try:
        record = json.loads(attempt.heartbeat.read_text())
        return Heartbeat(
            time=float(record["time"]),
            step=_int(record.get("step")),
            step_time=float(record.get("step_time") or 0.0),
            committed=_int(record.get("committed")),
            saving_since=float(record.get("saving_since") or 0.0),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_sign_of_life(attempt: AttemptDir, claim: Claim) -> float:
    """Return when the attempt was last heard of: its heartbeat, else its claim."""
    beat = read_heartbeat(attempt)
    return max(claim.time, beat.time) if beat else claim.time


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else -1
