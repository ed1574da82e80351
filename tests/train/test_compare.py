"""The comparison of two checkpoints: what it says of ones that are not complete or cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from checkpoint_harness import save  # noqa: E402

from pctool.checkpoint import manifest as mf  # noqa: E402
from pctool.checkpoint import torch as engine  # noqa: E402
from pctool.checkpoint.compare import main  # noqa: E402
from pctool.run.layout import RunDir  # noqa: E402


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Save one model twice."""
    run = RunDir(tmp_path / "run")
    return save(run, engine.TrainState(model=torch.nn.Linear(2, 2)), 1, 2)


def compare(saved: list[Path]) -> int:
    return main([str(path) for path in saved])


def test_two_of_one_state_are_equal(saved: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(saved) == 0
    assert json.loads(capsys.readouterr().out) == {"equal": True, "differing": [], "only_in_one": []}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("gone", [mf.NAME, ".metadata", "__0_0.distcp"])
def test_one_that_is_not_complete_is_said_as_that(
    saved: list[Path], capsys: pytest.CaptureFixture[str], which: int, gone: str
) -> None:
    (saved[which] / gone).unlink()
    assert compare(saved) == 4
    said = capsys.readouterr().err
    assert str(saved[which]) in said
    assert gone in said


def test_one_that_is_not_there_is_said_as_that(saved: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([saved[0], saved[0] / "nowhere"]) == 4
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("torn", [".metadata", "__0_0.distcp"])
def test_one_whose_bytes_are_damaged_is_no_traceback(
    saved: list[Path], capsys: pytest.CaptureFixture[str], torn: str
) -> None:
    path = saved[1] / torn
    path.write_bytes(b"x" * path.stat().st_size)
    assert compare(saved) == 4
    said = capsys.readouterr().err
    assert str(saved[1]) in said
    assert f"{torn}: CRC64-NVME" in said
