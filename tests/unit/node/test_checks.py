"""What a launch finds out about the interpreter that is to run the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest

from pctool.errors import UsageError
from pctool.node.checks import check_torch
from pctool.node.config import LaunchConfig


class Config:
    """What check_torch reads of a launch's config."""

    name = "n1"

    def __init__(self, folder: Path, *modules: str, script: str) -> None:
        for module in modules:
            (folder / "site" / module).mkdir(parents=True)
            (folder / "site" / module / "__init__.py").touch()
        interpreter = folder / "python"
        interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} -S "$@"\n')
        interpreter.chmod(0o755)
        (folder / "train.py").write_text(script)
        self.python = str(interpreter)
        self.script = (str(folder / "train.py"),)


def check(config: Config) -> None:
    check_torch(cast("LaunchConfig", config))


def test_what_is_needed_is_there(tmp_path: Path) -> None:
    check(Config(tmp_path, "torch", "awscrt", script="from pctool.train import Run"))


def test_torch_is_always_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no torch"):
        check(Config(tmp_path, "awscrt", script=""))


def test_awscrt_is_needed_where_checkpoints_are_saved_by_pctool(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no awscrt") as caught:
        check(Config(tmp_path, "torch", script="from pctool.train import Run"))
    assert "pctool[checkpoint]" in str(caught.value)


def test_a_script_that_saves_by_itself_needs_no_awscrt(tmp_path: Path) -> None:
    check(Config(tmp_path, "torch", script="import torch"))


def test_an_interpreter_that_breaks_is_not_taken_for_one_without_torch(tmp_path: Path) -> None:
    config = Config(tmp_path, "torch", script="")
    Path(config.python).write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(UsageError, match=r"does not run: it ended with 1 \(it said nothing\)"):
        check(config)
