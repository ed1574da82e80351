"""A run directory that takes no more: a save may fail for it, training and complete checkpoints may not."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pctool.checkpoint import torch as engine
from pctool.checkpoint.engine import Engine, Setup
from pctool.checkpoint.group import Group
from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.retention import Retention
from pctool.checkpoint.saving import RankLedger, Saver, say
from pctool.checkpoint.stores import PosixStore
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.train.metrics import Metrics


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Have every write beyond `size` bytes of a file fail, after it was done in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    run = RunDir(tmp_path)
    run.attempt(0).path.mkdir(parents=True)
    identity, group = engine.Identity(run=run, attempt=0), Group()
    saver = Saver(
        state=engine.TrainState(model=torch.nn.Linear(2, 2)),
        identity=identity,
        engine=Engine(Setup(identity=identity, keep=Retention(keep=2)), group, say=say),
        group=group,
        ledger=RankLedger(run.ledger),
        page=None,
    )
    yield saver
    saver.close()


def block(run: RunDir) -> None:
    """Make the ledger one that cannot be written."""
    run.ledger.symlink_to(run.path / "nowhere" / "ledger")


def test_a_checkpoint_counts_although_the_ledger_cannot_be_written(
    saver: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saver.identity.run
    block(run)
    saver.save(5, {})
    assert saver.saved(5)
    assert "committed" in capsys.readouterr().err
    run.ledger.unlink()
    point = find_resume(run, None)
    assert point is not None
    assert point.step == 5


def test_a_save_that_fails_is_told_and_training_goes_on(saver: Saver, capsys: pytest.CaptureFixture[str]) -> None:
    block(saver.identity.run)
    with largest_file(100):  # the writer is started inside, and inherits it
        saver.save(5, {})
        assert not saver.saved(5)
        assert not saver.save_and_leave(6, {})
    assert "step 5 could not be saved" in capsys.readouterr().err
    assert saver.saved_step is None
    assert PosixStore(saver.identity.run.checkpoints).names() == []  # else they would take the room of the next


def test_an_older_checkpoint_that_cannot_be_read_does_not_end_training(
    saver: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saver.save_and_leave(5, {})
    manifest = saver.identity.run.checkpoints / "000000-00000005" / "MANIFEST"
    manifest.unlink()
    manifest.symlink_to(manifest)  # ELOOP, for root too
    assert saver.save_and_leave(10, {})
    saver.close()  # it removes old ones once it has told
    assert "could not be removed" in capsys.readouterr().err
    assert [event.event for event in Ledger(saver.identity.run.ledger).read()] == ["committed", "committed"]


def test_metrics_wait_for_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path / "logs" / "metrics.jsonl")
    metrics.log(1, {"loss": 1})
    metrics.flush()
    with largest_file(metrics.path.stat().st_size + 5):
        for step in (2, 3):
            metrics.log(step, {"loss": step})
            metrics.flush()
    assert capsys.readouterr().err.count("cannot be written") == 1
    metrics.flush()
    assert [line[8] for line in metrics.path.read_text().splitlines()] == ["1", "2", "3"]
