"""What claim and the launches leave in an attempt's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pctool.errors import IncompleteError
from pctool.run.layout import AttemptDir, write_atomic

CAUSES = ("done", "stop", "peer-lost", "program-error", "signal")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who owns an attempt, and what its start learned of the ways to requeue it, for an end without Slurm."""

    job_id: str
    restart: int
    nonce: str
    host: str
    nodes: tuple[str, ...]
    time: float
    hub: str
    cluster: str = ""  # ClusterName@SlurmctldHost, or the name alone: a job id means something only there
    task: str = ""  # 9_1, for a task of an array: what Slurm's commands take for this task alone
    means: str = ""  # exit-code | scontrol: how this cluster requeues; '' where Slurm did not say
    requeue: bool | None = None  # Slurm's own flag of the job; None where Slurm did not say

    @property
    def label(self) -> str:
        """Return the id as Slurm's commands take it: 123, or 123_4 for a task of an array."""
        return self.task or self.job_id


_CLAIM_FIELDS = tuple(field.name for field in fields(Claim))


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """How the launch on one node ended: its first local cause. `saved` tells whether a stop was saved."""

    node: str
    cause: str  # one of CAUSES
    code: int  # exit code of the ranks, 128+n for a signal
    time: float
    why: str = ""
    saved: bool = False


def write_node_exit(attempt: AttemptDir, record: NodeExit) -> None:
    """Write a launch's record, atomically."""
    attempt.nodes.mkdir(parents=True, exist_ok=True)
    write_atomic(attempt.node_exit(record.node), json.dumps(asdict(record)).encode() + b"\n")


def read_node_exits(attempt: AttemptDir) -> dict[str, NodeExit]:
    """Return the records by node name; nodes that left none are not in it. Raise IncompleteError for a torn one."""
    paths = sorted(attempt.nodes.glob("*.exit")) if attempt.nodes.is_dir() else []
    records = (read_node_exit(path) for path in paths)
    return {record.node: record for record in records}


def read_node_exit(path: Path) -> NodeExit:
    """Return one node's record. Raise IncompleteError for a torn one."""
    try:
        return NodeExit(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise IncompleteError(f"not a node record: {error}", where=str(path)) from error


def read_claim(attempt: AttemptDir) -> Claim | None:
    """Return the attempt's claim; None if its owner died between mkdir and writing it.

    Raises IncompleteError for a torn one. Fields that this version does not know are left out.
    """
    try:
        record = json.loads(attempt.claim.read_text())
        known = {name: record[name] for name in _CLAIM_FIELDS if name in record}
        return Claim(**{**known, "nodes": tuple(record["nodes"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise IncompleteError(f"not a claim: {error}", where=str(attempt.claim)) from error


def claim_bytes(claim: Claim) -> bytes:
    """Return the text of claim.json."""
    return json.dumps(asdict(claim)).encode() + b"\n"
