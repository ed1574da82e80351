"""Save a checkpoint as a run does: with the engine, its writer and its coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.torch import Identity, State
from pctool.run.layout import RunDir


def save(
    run: RunDir,
    state: State,
    *steps: int,
    attempt: int = 0,
    parent: str | None = None,
    position: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Save a state once for each step, in this process alone; return the checkpoints' folders."""
    run.attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    engine = Engine(Setup(identity=Identity(run=run, attempt=attempt)), Group(), say=said.append)
    folders = []
    try:
        for step in steps:
            at = {"step": step, **(position or {})}
            started = engine.save(state, step, parent=parent, position=at)
            assert started is not None
            result = engine.settle()
            assert result is not None, said
            assert result.ok, result.why
            parent = started.name
            folders.append(run.checkpoints / started.name)
    finally:
        engine.close()
    return folders
