"""What every test shares: the golden files and the flag that rewrites them, and the markers that need a privilege."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one flag that rewrites golden files."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write what the program prints now into tests/golden"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `root` for everybody else."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return `check(name, text)`: compare `text` whole with tests/golden/NAME, or write it with --rewrite-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} is not there: write it with `pytest --rewrite-golden`")
        assert text == path.read_text(), f"differs from tests/golden/{name}; if it should, use --rewrite-golden"

    return check
