"""A run of one rank in this process, with the real engine, writer and coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from engine_gang import complete_steps, events
from engine_ranks import Known

from pctool.checkpoint import manifest as mf
from pctool.checkpoint import saving
from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.saving import RankLedger, Saver
from pctool.checkpoint.torch import Identity, TrainState, load
from pctool.run.layout import RunDir

KIB = 1024


class Bench:
    """A run of one rank on a given folder."""

    def __init__(self, folder: Path, *, busy: Literal["wait", "skip"] = "wait") -> None:
        self.run = RunDir(folder / "run")
        self.run.attempt(0).path.mkdir(parents=True)
        self.model = Known(KIB)
        identity = Identity(run=self.run, attempt=0)
        self.saver = Saver(
            state=TrainState(model=self.model),
            identity=identity,
            engine=Engine(Setup(identity=identity, busy=busy), Group(), say=saving.say),
            group=Group(),
            ledger=RankLedger(self.run.ledger),
            page=None,
        )

    def save(self, step: int) -> bool:
        """Save the state of a step, and return whether that is complete."""
        self.model.set(step)
        self.saver.save(step, {})
        return self.saver.saved(step)

    def check(self, *steps: int) -> None:
        """See that these are complete, and that the newest one comes back bit by bit."""
        assert set(complete_steps(self.run).values()) == set(steps)
        point = find_resume(self.run, None)
        assert point is not None
        assert point.step == max(steps)
        folder, fresh = self.run.checkpoints / point.name, Known(KIB)
        manifest = mf.read_manifest(folder)
        assert manifest is not None
        load(TrainState(model=fresh), folder, manifest, Group())
        assert not fresh.differing(point.step)

    def why(self, step: int, printed: str) -> str:
        """Return why a save failed: from the ledger, or from the log where the ledger could not be written."""
        told = [event.fields["error"] for event in events(self.run, "commit-failed") if event.fields["step"] == step]
        return str(told[0]) if told else printed
