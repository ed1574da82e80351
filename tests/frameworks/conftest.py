"""An empty run for each test, and signals as they were after it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from framework_harness import Attempts

from pctool.run.layout import RunDir


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    """Make an empty run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD)}
    (tmp_path / "run").mkdir()
    yield Attempts(RunDir(tmp_path / "run"))
    for number, handler in before.items():
        signal.signal(number, handler)
