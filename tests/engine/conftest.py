"""What these tests share."""

from __future__ import annotations

import pytest

from pctool.run import env


@pytest.fixture(autouse=True)
def small_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the writers not look for room beforehand: what they meet on a full disk is what is looked at here."""
    monkeypatch.setenv(env.ROOM, "ignore")
