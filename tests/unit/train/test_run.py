"""A `Run` of one rank, in this process: what it restores, measures and refuses."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pctool.checkpoint import Checkpointer
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.saving import Saver
from pctool.errors import NotFoundError, UsageError
from pctool.run.layout import checkpoint_name
from pctool.run.ledger import Ledger
from pctool.train import Run


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave only what a plain `python train.py` has."""
    for name in [name for name in os.environ if name.startswith(("PCTOOL_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def start(**options: Any) -> Run:
    """Start the next attempt of a run in ./run, as a script does."""
    model = torch.nn.Linear(2, 2)
    return Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


def train(run: Run, until: int) -> list[Any]:
    """Train and return the batches; a step draws nothing from the random states."""
    loader: DataLoader[int] = DataLoader(list(range(6)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    return [batch.tolist() for _, batch in run.steps(loader, until=until)]


def test_a_shuffled_loader_goes_on_in_the_same_order() -> None:
    torch.manual_seed(1)
    whole = train(start(run_dir="whole"), 9)
    torch.manual_seed(1)
    halves = train(start(), 4)
    torch.manual_seed(2)
    halves += train(start(), 9)
    assert halves == whole
    assert len({str(whole[at : at + 3]) for at in (0, 3, 6)}) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_place_that_another_number_of_ranks_had_is_said(capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    train(start(), 4)
    path = Path("run", "checkpoints", checkpoint_name(0, 4), mf.NAME)
    path.write_bytes(mf.encode(replace(mf.decode(path.read_bytes()), world_size=ranks)))
    start()
    told = capsys.readouterr().err
    assert ("(batch 1 of epoch 1) is that of 2 ranks: on 1 the rest of this epoch repeats" in told) is (ranks == 2)
    assert ("the loader's place" in told) is (ranks == 2)


def test_runs_of_another_seed_have_another_order() -> None:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append(train(start(run_dir=str(seed)), 9))
    assert orders[0] != orders[1]


def test_a_new_run_directory_goes_on_behind_what_the_old_one_saved() -> None:
    """Its file system is gone, its store is not: attempts of before have left their names there."""
    Path("run/checkpoints/000005-00001000").mkdir(parents=True)
    assert start().attempt == 6


def test_without_awscrt_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    with pytest.raises(UsageError, match="awscrt is not installed"):
        start()
    assert not Path("run").exists()


def test_the_time_of_a_save_is_not_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(every=2)
    monkeypatch.setattr(Saver, "save", lambda *_: time.sleep(0.5))
    train(run, 4)
    assert run._session.step_s < 0.25


def test_a_second_loop_is_refused() -> None:
    run = start()
    train(run, 3)
    with pytest.raises(UsageError, match="called a second time"):
        train(run, 6)
    assert train(start(), 6)  # the end of the first was saved


def test_a_run_may_begin_from_anothers_checkpoint_which_is_kept_for_it() -> None:
    first = start(run_dir="first", every=2, keep=2)
    train(first, 4)
    branch = start(run_dir="branch", start_from="first/checkpoints/000000-00000002")
    assert branch.step == 2
    assert len(train(branch, 5)) == 3
    assert [event.event for event in Ledger(branch.settings.run.ledger).read()][:2] == ["fresh", "branched"]
    again = start(run_dir="branch", start_from="first")  # once it has its own, it goes on from them
    assert again.step == 5
    train(start(run_dir="first", every=2, keep=2), 12)
    assert sorted(os.listdir("first/checkpoints")) == [
        ".refs",
        "000000-00000002",
        "000001-00000010",
        "000001-00000012",
    ]


@pytest.mark.parametrize(("source", "words"), [("nowhere", "no complete checkpoint"), ("x/000000-00000002", "no such")])
def test_what_is_not_there_is_nothing_to_begin_from(source: str, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        start(start_from=source)


def test_what_was_saved_last_is_complete_once_the_checkpointer_is_closed() -> None:
    weights = {"w": torch.zeros(16_000_000)}
    checkpointer = Checkpointer("loop")
    checkpointer.restore(weights)
    checkpointer.save(weights, 1)
    checkpointer.close()
    assert [event.event for event in Ledger(checkpointer.settings.run.ledger).read()] == ["fresh", "committed"]
    assert checkpointer.saver.saved_step == 1
