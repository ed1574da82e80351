"""The files that come with pctool are found in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.errors import NotFoundError
from pctool.facts import resources
from pctool.facts.resources import FOLDERS, resource


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_is_there(name: str) -> None:
    assert any(resource(name).iterdir())


def test_an_installed_wheel_is_looked_into_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pctool"
    (package / "_data" / "sbatch-templates").mkdir(parents=True)
    monkeypatch.setattr(resources, "files", lambda name: tmp_path / name)
    assert resource("sbatch-templates") == package / "_data" / "sbatch-templates"


def test_what_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(NotFoundError, match=r"no-such-template\.j2 does not come with"):
        resource("sbatch-templates/no-such-template.j2")
