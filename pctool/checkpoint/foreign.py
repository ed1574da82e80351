"""Whose the checkpoints on S3 are: two runs may come to use the same keys there, and must not take each other's.

A manifest says by which run directory it was saved, as an absolute path. One that says none is not judged. A run that
was moved knows its checkpoints from its ledger, which moved with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from pctool.checkpoint.manifest import Manifest
from pctool.errors import PctoolError
from pctool.run.layout import RunDir
from pctool.run.ledger import Event


class ForeignCheckpointError(PctoolError):
    """The store holds, under this run's name, what another run has saved."""

    exit_code = 4


def is_foreign(run: RunDir, saved_by: str) -> bool:
    """Return whether a manifest's `run` is another run's directory."""
    # one directory may be reached by several paths: /fsx and what it is a link to
    return os.path.isabs(saved_by) and os.path.realpath(saved_by) != os.path.realpath(run.path)


def copied_names(events: Iterable[Event]) -> frozenset[str]:
    """Return the names that this run's own mirror copied: what S3 has of that name is this run's."""
    return frozenset(str(event.fields.get("name", "")) for event in events if event.event == "mirrored")


def taken_names(events: Iterable[Event]) -> frozenset[str]:
    """Return the names that the run went on from knowingly, whoever saved them: accepted, or taken from S3 before.

    That it committed one of that name says nothing of what S3 has: another run's may be called the same.
    """
    return frozenset(
        str(event.fields.get("name") or "")
        for event in events
        if event.event == "accepted" or (event.event == "resumed" and event.fields.get("tier") == "s3")
    )


def taken_runs(events: Iterable[Event]) -> frozenset[str]:
    """Return the other runs that the owner let this one go on from."""
    return frozenset(str(event.fields.get("run") or "") for event in events if event.event == "accepted")


def is_taken(run: RunDir, name: str, manifest: Manifest, events: Iterable[Event]) -> bool:
    """Return whether this run may go on from what S3 has under this name."""
    events = list(events)
    return not is_foreign(run, manifest.run) or name in copied_names(events) | taken_names(events)


def with_other_contents(where: str) -> ForeignCheckpointError:
    """Return the error for a checkpoint on S3 that is called as one of ours and is another."""
    return ForeignCheckpointError(
        "a checkpoint of this name is there already, with other contents",
        where=where,
        fix="give each run a run directory's name or a store prefix of its own",
    )


def of_another(run: RunDir, where: str, saved_by: str) -> ForeignCheckpointError:
    """Return the error for a store that holds what `saved_by` has saved."""
    return ForeignCheckpointError(
        f"{where} holds checkpoints of another run, {saved_by}",
        where=str(run.path),
        fix="choose another store prefix or another name for the run directory, or go on from them knowingly with "
        f"`pctool resume {run.path} --from STEP`",
    )
