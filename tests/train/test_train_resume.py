"""Interrupted and resumed training equals uninterrupted training, bit by bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_harness import SCRIPT, Trainer, finish

from pctool.checkpoint.compare import compare
from pctool.checkpoint.manifest import verify
from pctool.run.page import Outcome

pytestmark = pytest.mark.torch


def last_checkpoint(trainer: Trainer) -> Path:
    return max(trainer.run.checkpoints.iterdir())


def assert_same(trainer: Trainer, baseline: Trainer, ranks: int = 2) -> None:
    for rank in range(ranks):
        assert trainer.metrics(rank) == baseline.metrics(rank)
    result = compare(last_checkpoint(trainer), last_checkpoint(baseline))
    assert result == {"equal": True, "differing": [], "only_in_one": []}


@pytest.mark.parametrize("wrapping", [[], ["--fsdp"]], ids=["ddp", "fsdp2"])
def test_killed_and_resumed_equals_uninterrupted(trainer: Trainer, baseline: Trainer, wrapping: list[str]) -> None:
    baseline.train(*wrapping, "--workers", "2", page=False)
    trainer.train(*wrapping, "--workers", "2", "--die-at", "17", page=False, code=1)
    said = trainer.train(*wrapping, "--workers", "2", page=False)
    assert "resumed from 000000-00000010 (posix) at step 10" in said
    assert_same(trainer, baseline)
    assert [event["step"] for event in trainer.events("committed")] == [10, 20, 30]
    assert [event.get("parent") for event in trainer.events("committed")] == [
        None,
        "000000-00000010",
        "000001-00000020",
    ]
    assert trainer.events("first-step") == [{"step": 1}, {"step": 11}]
    assert all(verify(folder).ok for folder in trainer.run.checkpoints.iterdir())


def test_stopped_and_resumed_equals_uninterrupted(trainer: Trainer, baseline: Trainer) -> None:
    baseline.train()
    assert baseline.page.outcome is Outcome.DONE
    process = trainer.start("--step-s", "0.01")
    trainer.await_step(12, process)
    trainer.stop(deadline=time.time() + 60)
    finish(process, 0)
    assert trainer.page.outcome is Outcome.STOPPED
    (stop,) = trainer.events("stop-step")
    assert trainer.page.committed == trainer.page.step == stop["step"]
    trainer.train()
    assert trainer.events("resumed")[0]["step"] == stop["step"]
    assert_same(trainer, baseline)


def test_a_finished_run_started_again_trains_nothing(trainer: Trainer) -> None:
    trainer.train("--steps", "10")
    trainer.train("--steps", "10")
    assert trainer.page.outcome is Outcome.DONE
    assert len(trainer.events("first-step")) == 1
    assert len(trainer.events("committed")) == 1


def test_another_number_of_ranks_covers_each_sample_once(trainer: Trainer) -> None:
    """4 ranks, then 2: the epoch's samples come up once each, whoever trains on them."""
    flags = ("--length", "120", "--batch-size", "5", "--every", "3")
    trainer.train(*flags, "--steps", "3", ranks=4)
    said = trainer.train(*flags, "--steps", "9", ranks=2)
    assert "extra seen was saved by 4 ranks, each its own: rank r goes on with what rank r % 4 had" in said
    assert trainer.events("resumed")[0]["step"] == 3
    lines = [trainer.metrics(rank).values() for rank in range(4)]
    seen = [sample for rank in lines for line in rank for sample in line["samples"]]
    assert sorted(seen) == list(range(120))


def test_fsdp2_restores_on_another_number_of_ranks(trainer: Trainer) -> None:
    trainer.train("--fsdp", "--steps", "10", ranks=3)
    said = trainer.train("--fsdp", "--steps", "20", ranks=2)
    assert "resumed from 000000-00000010" in said


def test_a_checkpoint_is_plain_dcp(trainer: Trainer, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trainer.train("--fsdp", "--steps", "10")
    dcp_to_torch_save(str(last_checkpoint(trainer)), str(tmp_path / "flat.pt"))
    state = torch.load(tmp_path / "flat.pt", weights_only=False)
    assert state["model"]["0.weight"].shape == (16, 8)
    assert state["scheduler"]["last_epoch"] == 10
    assert "0.weight" in state["optimizer"]["state"]


def test_a_changed_model_is_told_apart_from_damage(trainer: Trainer) -> None:
    trainer.train("--steps", "10", "--length", "101")
    said = trainer.train("--steps", "20", "--length", "99", code=1)
    assert "length was 101, is 99" in said


def test_only_as_many_are_kept_as_asked(trainer: Trainer) -> None:
    trainer.train("--steps", "50", "--keep", "2")
    names = sorted(name for name in os.listdir(trainer.run.checkpoints) if not name.startswith("."))
    assert names == ["000000-00000040", "000000-00000050"]
    assert [event["name"] for event in trainer.events("pruned")] == [
        "000000-00000010",
        "000000-00000020",
        "000000-00000030",
    ]


@pytest.mark.parametrize("how", ["--fail-save-at", "--fail-file-at"])
def test_a_failure_on_one_rank_fails_that_save_alone(trainer: Trainer, how: str) -> None:
    said = trainer.train(how, "20")
    assert "No space left on device" in said
    (failed,) = trainer.events("commit-failed")
    assert (failed["step"], "rank 1" in failed["error"]) == (20, True)
    assert [event["step"] for event in trainer.events("committed")] == [10, 30]
    assert trainer.events("committed")[1]["parent"] == "000000-00000010"


def test_an_unfinished_folder_of_the_same_name_is_no_obstacle(trainer: Trainer) -> None:
    folder = trainer.run.checkpoints / "000000-00000010"
    folder.mkdir(parents=True)
    for left in ("__0_0.distcp", "__7_0.distcp", ".metadata"):
        (folder / left).write_bytes(b"left by a save that died")
    trainer.train("--steps", "10")
    assert verify(folder).ok
    assert not (folder / "__7_0.distcp").exists()


def test_a_failed_save_at_the_stop_still_exits_0(trainer: Trainer) -> None:
    process = trainer.start("--step-s", "0.01", "--fail-saves", "--every", "1000", "--steps", "1000")
    trainer.await_step(4, process)
    trainer.stop()
    finish(process, 0)
    assert trainer.page.outcome is Outcome.STOPPED_UNSAVED
    assert trainer.page.committed == -1
    assert [event["step"] for event in trainer.events("commit-failed")] == [trainer.page.step]


def test_a_failed_save_at_the_end_is_an_error(trainer: Trainer) -> None:
    said = trainer.train("--fail-saves", "--every", "1000", "--steps", "3", code=1)
    assert "the end of the run (step 3) could not be saved" in said
    assert trainer.page.outcome is Outcome.NONE


def test_a_fenced_attempt_publishes_nothing(trainer: Trainer) -> None:
    process = trainer.start("--step-s", "0.02", "--every", "10")
    trainer.await_step(2, process)
    trainer.run.attempt(trainer.attempt + 1).path.mkdir()
    said = finish(process, 1)
    assert "attempt 1 has taken over this run" in said
    assert trainer.events("committed") == []


def test_alone_without_a_launcher(tmp_path: Path, trainer: Trainer) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PCTOOL_")}
    for steps in ("20", "30"):
        subprocess.run([sys.executable, str(SCRIPT), "--steps", steps], cwd=tmp_path / "run", env=environ, check=True)
    run = Trainer(type(trainer.run)(tmp_path / "run" / "run"))
    assert [event["step"] for event in run.events("committed")] == [10, 20, 30]
    assert sorted(run.metrics(0)) == list(range(1, 31))


def test_workers_outlive_the_signals_that_come_before_the_save(trainer: Trainer) -> None:
    process = trainer.start("--step-s", "0.02", "--workers", "2", "--every", "100", "--steps", "400")
    trainer.await_step(3, process)
    workers = [pid for pid in _descendants(process.pid) if len(_ancestors(pid, process.pid)) >= 2]
    assert len(workers) == 4  # two a rank
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)
    trainer.await_step(trainer.page.step + 10, process)
    trainer.stop()
    finish(process, 0)
    assert trainer.page.outcome is Outcome.STOPPED


def test_an_exception_ends_a_rank_that_has_workers(trainer: Trainer) -> None:
    printed = trainer.train("--raise-at", "5", "--workers", "2", "--step-s", "0.02", "--steps", "400", code=1)
    assert "told to raise" in printed


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return parents


def _ancestors(pid: int, top: int) -> list[int]:
    parents, chain = _parents(), []
    while (pid := parents.get(pid, 0)) not in {0, 1, top}:
        chain.append(pid)
    return [*chain, top]


def _descendants(top: int) -> list[int]:
    parents = _parents()
    found, layer = [], [top]
    while layer:
        layer = [pid for pid, parent in parents.items() if parent in layer]
        found += layer
    return [pid for pid in found if not _is_writer(pid)]


def _is_writer(pid: int) -> bool:
    return b"pctool.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
