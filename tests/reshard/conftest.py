"""The harness of the training tests, and an empty run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))

from trainer_harness import Trainer

from pctool.run.layout import RunDir


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Make an empty run."""
    (tmp_path / "run").mkdir()
    return Trainer(RunDir(tmp_path / "run"))
