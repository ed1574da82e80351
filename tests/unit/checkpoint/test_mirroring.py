"""The mirror of a run without launch: that it cannot be started ends neither a save nor the training."""

from __future__ import annotations

from pathlib import Path

from pctool.checkpoint.mirroring import MirrorChild
from pctool.run.layout import RunDir


def test_a_mirror_that_cannot_be_started_is_said_and_not_called_done(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("where a folder should be")
    said: list[str] = []
    child = MirrorChild(RunDir(tmp_path), "s3://bucket/runs", 0, say=said.append)
    assert child.finish()  # nothing was committed
    child.committed()
    assert "cannot be started" in said[0]
    assert not child.finish()
