"""Empty runs for the small training script."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_harness import Trainer

from pctool.run.layout import RunDir


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Make an empty run."""
    (tmp_path / "run").mkdir()
    return Trainer(RunDir(tmp_path / "run"))


@pytest.fixture
def baseline(tmp_path: Path) -> Trainer:
    """Make another empty run, for the one that is never interrupted."""
    (tmp_path / "baseline").mkdir()
    return Trainer(RunDir(tmp_path / "baseline"))
