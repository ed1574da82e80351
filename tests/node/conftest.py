"""The fixture that makes gangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gang_harness import Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Return a function that makes a gang; all are ended with the test."""
    made: list[Gang] = []

    def make(**options: Any) -> Gang:
        made.append(Gang(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
