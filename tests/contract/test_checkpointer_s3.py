"""A loop of one's own, without launch: its checkpoints reach S3, and come back from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pctool.checkpoint import Checkpointer
from pctool.run import env
from pctool.run.ledger import Ledger


def test_a_loop_of_ones_own_is_mirrored_and_restored(
    url: str, s3: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (env.RUN_DIR, env.ATTEMPT, env.PAGE, env.WRITER, env.STORE, env.EVERY):
        monkeypatch.delenv(name, raising=False)
    run, weights = tmp_path / "run", {"w": torch.zeros(1000)}
    first = Checkpointer(run, mirror=url, every=1)
    assert first.restore(weights) is None
    for step in (1, 2):
        weights["w"] += step
        first.save(weights, step)
    first.close()
    mirrored = [event.fields["step"] for event in Ledger(run / "ledger.jsonl").read() if event.event == "mirrored"]
    assert 2 in mirrored
    shutil.rmtree(run / "checkpoints")
    again = {"w": torch.ones(1000)}
    second = Checkpointer(run, mirror=url)
    restored = second.restore(again)
    second.close()
    assert restored is not None
    assert (restored.step, restored.tier) == (2, "s3")
    assert torch.equal(again["w"], weights["w"])
