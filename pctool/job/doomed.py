"""A node of the run that a spot notice will take away: Slurm may give it to the requeued job once more until then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pctool.errors import SlurmError
from pctool.run.ledger import Event
from pctool.slurm import query

# what `scontrol show node` says of a node that gets no job: drained by root's watcher, or gone already
_NOT_GIVEN = frozenset({"DRAIN", "DOWN", "FAIL", "POWERING_DOWN", "POWER_DOWN", "POWERED_DOWN"})


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """A node and when it is taken away, in seconds since the epoch."""

    node: str
    until: float


def doomed(events: Iterable[Event], *, now: float) -> Doomed | None:
    """Return the node with the last deadline ahead, or None where there is none, or Slurm gives it to no job."""
    notices = [event for event in events if event.event in {"notice", "step-back"}]
    ahead = {str(event.fields.get("node")): float(event.fields.get("deadline") or 0.0) for event in notices}
    given = {node: until for node, until in ahead.items() if until > now and _is_given(node)}
    if not given:
        return None
    node = max(given, key=lambda name: given[name])
    return Doomed(node=node, until=given[node])


def _is_given(name: str) -> bool:
    try:
        node = query.show_node(name)
    except SlurmError:
        return True  # not known: to wait for the notice is the safe way
    return node is not None and not node.states & _NOT_GIVEN
