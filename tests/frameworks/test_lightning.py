"""Lightning's Trainer with a PctoolCallback: an interrupted run equals one that was not, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from framework_harness import Attempts, Lost, ask_to_stop  # noqa: E402
from lightning.fabric.plugins.environments import SLURMEnvironment  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from lightning_small import SAMPLES, AtStep, Small, fit, make_trainer, same  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

from pctool.checkpoint import Checkpointer  # noqa: E402
from pctool.errors import UsageError  # noqa: E402
from pctool.run.page import Outcome  # noqa: E402
from pctool.train.lightning import PctoolCallback  # noqa: E402

# what Lightning warns of is its own
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

torch.set_num_threads(1)  # they would get in each other's way


def train(folder: Path, *callbacks: Any, every: int | None = 4, loader: Any = None, **options: Any) -> Small:
    """Fit in a run directory below `folder`."""
    own = PctoolCallback(every=every, run_dir=str(folder / "run"))
    return fit(make_trainer(folder, own, *callbacks, **options), loader=loader)


def whole(folder: Path, **options: Any) -> Small:
    """Fit without an interruption, as a run of its own, since pctool sees to the order of the samples."""
    return train(folder / "whole", every=None, **options)


def assert_same(parts: list[Small], other: Small) -> None:
    losses = {key: value for part in parts for key, value in part.losses.items()}
    assert losses == other.losses
    assert same(parts[-1], other)


def interrupted(attempts: Attempts, folder: Path, lost_at: int, *, every: int, **options: Any) -> list[Small]:
    """Fit, lose the node at a step, and fit again; return both modules."""
    saved = lost_at // every * every
    kept: list[Small] = []

    class Keep(AtStep):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            kept.append(pl_module)

    with pytest.raises(Lost):
        train(folder, Keep(lost_at, lambda: attempts.lose(saved)), every=every, **options)
    return [*kept, train(folder, every=every, **options)]


@pytest.mark.parametrize(
    ("lost_at", "every", "batches"),
    [(6, 4, 2), (6, 4, 1), (9, 7, 2), (29, 13, 1)],
    ids=["in an epoch", "behind a validation", "where an epoch begins", "where the last one begins"],
)
def test_lost_and_resumed_equals_uninterrupted(
    attempts: Attempts, tmp_path: Path, lost_at: int, every: int, batches: int
) -> None:
    parts = interrupted(attempts, tmp_path, lost_at, every=every, accumulate_grad_batches=batches)
    assert [event["step"] for event in attempts.events("resumed")] == [lost_at // every * every]
    assert_same(parts, whole(tmp_path, accumulate_grad_batches=batches))


def test_stopped_and_resumed_equals_uninterrupted(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attempts.attempt(monkeypatch) as page, pytest.raises(SystemExit) as ended:
        train(tmp_path, AtStep(10, lambda: ask_to_stop(page)))
    assert ended.value.code == 0
    assert (page.outcome, page.committed, page.step) == (Outcome.STOPPED, 10, 10)
    with attempts.attempt(monkeypatch) as page:
        model = train(tmp_path)
    assert (page.outcome, page.committed, page.step) == (Outcome.DONE, 21, 21)
    other = whole(tmp_path)
    assert model.losses.items() < other.losses.items()
    assert same(model, other)


def test_two_ranks_stop_together_and_go_on(attempts: Attempts, tmp_path: Path) -> None:
    said = attempts.torchrun("lightning_script.py", str(tmp_path), "2")
    assert "Traceback" not in said
    assert attempts.page is not None
    assert attempts.page.outcome is Outcome.STOPPED
    (stop,) = attempts.events("stop-step")
    assert 2 <= stop["step"] <= 5
    said = attempts.torchrun("lightning_script.py", str(tmp_path), "0")
    assert f"at step {stop['step']}" in said
    assert said.count("is the same after") == 2


@pytest.mark.parametrize("length", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 10}], ids=["epochs", "steps"])
def test_a_finished_run_started_again_trains_nothing(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: dict[str, int]
) -> None:
    first = train(tmp_path, **length)
    with attempts.attempt(monkeypatch) as page:
        again = train(tmp_path, **length)
    assert page.outcome is Outcome.DONE
    assert again.losses == {}
    assert same(again, first)
    assert len(attempts.events("first-step")) == 1


def test_early_stopping_counts_on_and_ends_the_run(attempts: Attempts, tmp_path: Path) -> None:
    def patience() -> EarlyStopping:
        return EarlyStopping("val_loss", min_delta=1e9, patience=3)  # nothing counts as better

    options: dict[str, Any] = {"accumulate_grad_batches": 1, "every": 5}
    with pytest.raises(Lost):
        train(tmp_path, patience(), AtStep(11, lambda: attempts.lose(10)), **options)
    trainer = make_trainer(
        tmp_path, PctoolCallback(every=5, run_dir=str(tmp_path / "run")), patience(), accumulate_grad_batches=1
    )
    fit(trainer)
    # validated after batches 4, 8 and 12 of an epoch: the first sets the best, the fourth is the third no better one
    assert trainer.global_step == 13 + 4
    again = train(tmp_path, patience(), **options)
    assert again.losses == {}


def test_lightnings_own_checkpoints_go_on_as_before(attempts: Attempts, tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path / "own", every_n_train_steps=5, save_top_k=-1)
    train(tmp_path, own, enable_checkpointing=True, max_epochs=1)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["epoch=0-step=5.ckpt"]


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(attempts: Attempts, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        train(tmp_path, AtStep(10, lambda: attempts.lose(8)))
    (data,) = (attempts.run.checkpoints / "000000-00000008").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    model = train(tmp_path)
    assert attempts.events("resumed")[-1]["step"] == 4
    assert same(model, whole(tmp_path))


class Counted(Dataset[Any]):
    """Samples that are counted when they are loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return SAMPLES[index]


def test_what_is_done_is_not_loaded_again_and_not_counted_twice(attempts: Attempts, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        train(tmp_path, AtStep(10, lambda: attempts.lose(8)), loader=DataLoader(Counted(), 4))
    data = Counted()
    trainer = make_trainer(tmp_path, PctoolCallback(run_dir=str(tmp_path / "run")))
    fit(trainer, loader=DataLoader(data, 4))
    assert data.loaded == [*range(8, 50), *range(50)]
    assert trainer.fit_loop.epoch_loop.batch_progress.total.ready == 3 * 13


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES


def test_a_loader_without_a_length_is_begun_where_the_run_stands(attempts: Attempts, tmp_path: Path) -> None:
    options: dict[str, Any] = {"loader": DataLoader(Stream(), 4), "val_check_interval": 1.0}
    parts = interrupted(attempts, tmp_path, 10, every=4, **options)
    assert_same(parts, whole(tmp_path, **options))


class Counting:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for self.at in range(start + 1, len(SAMPLES) + 1):
            yield SAMPLES[self.at - 1][None]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it(attempts: Attempts, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 1.0}
    kept: list[Small] = []

    class Keep(AtStep):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            kept.append(pl_module)

    with pytest.raises(Lost):
        train(tmp_path, Keep(10, lambda: attempts.lose(8)), loader=Counting(), **options)
    model = train(tmp_path, loader=Counting(), **options)
    assert_same([*kept, model], whole(tmp_path, loader=Counting(), **options))


def test_another_loops_checkpoint_is_refused(attempts: Attempts, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save_last({"weight": torch.zeros(2)}, 5)
    checkpointer.close()
    with pytest.raises(UsageError, match="was not saved by Lightning"):
        train(tmp_path)


def test_wrong_use_is_told(tmp_path: Path) -> None:
    own = [PctoolCallback(run_dir=str(tmp_path / "run")) for _ in range(2)]
    with pytest.raises(UsageError, match="several PctoolCallbacks"):
        fit(make_trainer(tmp_path, *own))
    with pytest.raises(UsageError, match="no end"):
        fit(make_trainer(tmp_path, own[0], max_epochs=-1))
    with pytest.raises(UsageError, match="fast_dev_run"):
        fit(make_trainer(tmp_path, own[0], fast_dev_run=True))
    trainer = make_trainer(tmp_path, own[0])
    trainer.strategy.__class__ = FSDPStrategy  # which wants a GPU to be made
    with pytest.raises(UsageError, match="FSDPStrategy is not supported"):
        own[0].setup(trainer, Small(), "fit")
    assert not (tmp_path / "run").exists()
    trainer = make_trainer(tmp_path, own[0], max_epochs=1, limit_train_batches=2, val_check_interval=1.0)
    fit(trainer)
    with pytest.raises(UsageError, match="a second time"):
        fit(trainer)


def test_only_pctool_requeues(
    tmp_path: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"JOB_ID": "7", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    environment = SLURMEnvironment()
    assert environment.auto_requeue
    train(tmp_path, plugins=[environment], max_epochs=1, limit_train_batches=2, val_check_interval=1.0)
    assert not environment.auto_requeue
    assert "auto_requeue is switched off" in capsys.readouterr().err
