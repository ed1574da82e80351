"""Hugging Face's Trainer with a PctoolCallback: an interrupted run equals one that was not, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from framework_harness import Attempts, Lost, ask_to_stop  # noqa: E402
from hf_small import AtStep, make_trainer, told, weights  # noqa: E402
from transformers import EarlyStoppingCallback, TrainerCallback  # noqa: E402

from pctool.checkpoint import Checkpointer  # noqa: E402
from pctool.errors import UsageError  # noqa: E402
from pctool.run.page import Outcome  # noqa: E402
from pctool.train.hf import PctoolCallback  # noqa: E402

# what transformers and accelerate warn of is theirs
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


torch.set_num_threads(1)  # they would get in each other's way


def train(folder: Path, *callbacks: TrainerCallback, every: int | None = 4, **options: Any) -> Any:
    trainer = make_trainer(folder, **options)
    trainer.add_callback(PctoolCallback(trainer, every=every, run_dir=str(folder / "run")))
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def baseline(folder: Path, **options: Any) -> Any:
    trainer = make_trainer(folder, **options)
    trainer.train()
    return trainer


def assert_same(trainer: Any, other: Any) -> None:
    assert told(trainer) == told(other)
    assert trainer.state.epoch == other.state.epoch
    assert all(torch.equal(one, two) for one, two in zip(weights(trainer), weights(other), strict=True))


@pytest.mark.parametrize(
    ("lost_at", "every"),
    [(6, 4), (9, 7), (19, 4)],
    ids=["in an epoch, behind an evaluation", "where an epoch ends", "in the last one"],
)
def test_lost_and_resumed_equals_uninterrupted(attempts: Attempts, tmp_path: Path, lost_at: int, every: int) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4}
    with pytest.raises(Lost):
        train(tmp_path, AtStep(lost_at, lambda: attempts.lose(lost_at // every * every)), every=every, **options)
    trainer = train(tmp_path, every=every, **options)
    assert [event["step"] for event in attempts.events("resumed")] == [lost_at // every * every]
    assert_same(trainer, baseline(tmp_path, **options))


def test_stopped_and_resumed_equals_uninterrupted(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attempts.attempt(monkeypatch) as page, pytest.raises(SystemExit) as ended:
        train(tmp_path, AtStep(10, lambda: ask_to_stop(page)))
    assert ended.value.code == 0
    assert (page.outcome, page.committed, page.step) == (Outcome.STOPPED, 10, 10)
    with attempts.attempt(monkeypatch) as page:
        trainer = train(tmp_path)
    assert (page.outcome, page.committed, page.step) == (Outcome.DONE, 21, 21)
    assert_same(trainer, baseline(tmp_path))


def test_two_ranks_stop_together_and_go_on(attempts: Attempts, tmp_path: Path) -> None:
    said = attempts.torchrun("hf_script.py", str(tmp_path), "2")
    assert "Traceback" not in said
    assert attempts.page is not None
    assert attempts.page.outcome is Outcome.STOPPED
    (stop,) = attempts.events("stop-step")
    assert 2 <= stop["step"] <= 5
    said = attempts.torchrun("hf_script.py", str(tmp_path), "0")
    assert f"at step {stop['step']}" in said
    assert said.count("is the same after") == 2


def test_a_finished_run_started_again_trains_nothing(attempts: Attempts, tmp_path: Path) -> None:
    first = train(tmp_path, max_steps=10)  # in the middle of the second epoch
    again = train(tmp_path, max_steps=10)
    assert again.state.global_step == 10
    assert_same(again, first)
    assert [event["step"] for event in attempts.events("committed")] == [4, 8, 10]
    assert [event["step"] for event in attempts.events("first-step")] == [1]


def test_a_finished_run_goes_on_when_asked_for_more(attempts: Attempts, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"lr_scheduler_type": "constant"}
    train(tmp_path, max_steps=10, **plain)
    trainer = train(tmp_path, max_steps=13, **plain)
    assert [event["step"] for event in attempts.events("first-step")] == [1, 11]
    assert_same(trainer, baseline(tmp_path, max_steps=13, **plain))


def test_early_stopping_counts_on_and_ends_the_run(attempts: Attempts, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_strategy": "steps",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    patience = EarlyStoppingCallback(3, early_stopping_threshold=1e9)  # nothing counts as better
    with pytest.raises(Lost):
        train(tmp_path, patience, AtStep(6, lambda: attempts.lose(5)), every=5, **options)
    trainer = train(tmp_path, EarlyStoppingCallback(3, early_stopping_threshold=1e9), every=5, **options)
    assert trainer.state.global_step == 8  # 2 sets the best; 4, 6 and 8 are no better, though 4 was before the loss
    assert "EarlyStoppingCallback" in trainer.state.stateful_callbacks
    again = train(tmp_path, EarlyStoppingCallback(3, early_stopping_threshold=1e9), every=5, **options)
    assert again.state.global_step == 8
    assert [event["step"] for event in attempts.events("first-step")] == [1, 6]
    assert (tmp_path / "out" / "checkpoint-8" / "optimizer.pt").exists()  # Trainer's own go on as before


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(attempts: Attempts, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        train(tmp_path, AtStep(10, lambda: attempts.lose(8)))
    (data,) = (attempts.run.checkpoints / "000000-00000008").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    trainer = train(tmp_path)
    assert attempts.events("resumed")[-1]["step"] == 4
    assert [event["step"] for event in attempts.events("first-step")] == [1, 5]
    assert_same(trainer, baseline(tmp_path))


def test_a_gradient_scaler_is_restored(attempts: Attempts, tmp_path: Path) -> None:
    def scaled(*callbacks: TrainerCallback, scale: float) -> Any:
        trainer = make_trainer(tmp_path, max_steps=10)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        trainer.add_callback(PctoolCallback(trainer, every=4, run_dir=str(tmp_path / "run")))
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        return trainer

    with pytest.raises(Lost):
        scaled(AtStep(6, lambda: attempts.lose(4)), scale=2.0)
    trainer = scaled(scale=64.0)
    assert trainer.accelerator.scaler.get_scale() == 2.0 * 2**3  # doubled after steps 3, 6 and 9


def test_resume_from_checkpoint_is_for_the_first_start_alone(
    attempts: Attempts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    baseline(tmp_path, **own)
    start = str(tmp_path / "out" / "checkpoint-5")
    for _ in range(2):
        trainer = make_trainer(tmp_path, **{**own, "save_strategy": "no"})
        trainer.add_callback(PctoolCallback(trainer, every=2, run_dir=str(tmp_path / "run")))
        trainer.train(resume_from_checkpoint=start)
    assert [event["step"] for event in attempts.events("first-step")] == [6]
    assert "resume_from_checkpoint is left alone" in capsys.readouterr().err


def test_another_batch_size_in_an_epoch_is_refused(attempts: Attempts, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        train(tmp_path, AtStep(6, lambda: attempts.lose(4)))
    with pytest.raises(UsageError, match="a step had 8 samples over all ranks and has 4 now"):
        train(tmp_path, gradient_accumulation_steps=1)
    assert train(tmp_path, gradient_accumulation_steps=1, ignore_data_skip=True, max_steps=6).state.global_step == 6


def test_another_loops_checkpoint_is_refused(attempts: Attempts, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save_last({"weight": torch.zeros(2)}, 5)
    checkpointer.close()
    with pytest.raises(UsageError, match="step 5 was not saved by a Trainer"):
        train(tmp_path)


def test_wrong_use_is_told(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    callback = PctoolCallback(trainer, run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match="not given to it"):
        trainer.train()
    trainer.add_callback(callback)
    with pytest.raises(UsageError, match="has a PctoolCallback already"):
        PctoolCallback(trainer)
    with pytest.raises(UsageError, match="in the place of its trainer"):
        PctoolCallback(trainer.args)
    trainer.args.max_steps = 1
    trainer.train()
    with pytest.raises(UsageError, match="a second time"):
        trainer.train()


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("is_fsdp_enabled", True, "shards the model"),
        ("args.auto_find_batch_size", True, "auto_find_batch_size"),
        ("args.accelerator_config.use_seedable_sampler", False, "use_seedable_sampler"),
        ("args._n_gpu", 2, "DataParallel"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, attribute: str, value: Any, told: str) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(PctoolCallback(trainer, run_dir=str(tmp_path / "run")))
    *path, name = attribute.split(".")
    owner = trainer
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    with pytest.raises(UsageError, match=told):
        trainer.train()
    assert not (tmp_path / "run").exists()
