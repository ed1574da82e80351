"""What a checkpoint brings back of `extra`, and how it says that it cannot be loaded."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_harness import save as save_with_engine
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pctool.checkpoint import own, rng
from pctool.checkpoint import torch as engine
from pctool.checkpoint.group import Group
from pctool.checkpoint.manifest import read_manifest
from pctool.checkpoint.reader import DamagedFileError, VerifiedReader
from pctool.checkpoint.stores import StoreUnreadableError
from pctool.errors import UsageError
from pctool.run.layout import RunDir


class Part:
    """Anything with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save(path: Path, **extra: Any) -> Path:
    """Save a checkpoint of step 1 and return its folder."""
    return save_with_engine(RunDir(path), engine.TrainState(model=torch.nn.Linear(2, 2), extra=extra), 1)[0]


def load(folder: Path, **extra: Any) -> engine.Loaded:
    manifest = read_manifest(folder)
    assert manifest is not None
    return engine.load(engine.TrainState(model=torch.nn.Linear(2, 2), extra=extra), folder, manifest, Group())


def test_an_extra_comes_back_as_it_was_whatever_the_fresh_object_has(tmp_path: Path) -> None:
    state = {"best": 1.0, "seen": {"shard1": 1, 2: torch.arange(3)}, "hist": [torch.ones(2), 5]}
    folder = save(tmp_path, x=Part(state))
    fresh = Part({"best": 0.0, "seen": {}, "hist": []})
    load(folder, x=fresh)
    assert str(fresh.state) == str(state)


def test_an_optimizer_in_extra_keeps_its_moments(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    saved, fresh = (torch.optim.Adam(model.parameters()) for _ in range(2))
    model(torch.ones(2)).sum().backward()
    saved.step()
    load(save(tmp_path, critic=saved), critic=fresh)
    assert str(fresh.state_dict()) == str(saved.state_dict())


def test_a_module_in_extra_is_saved_like_the_model(tmp_path: Path) -> None:
    saved, fresh = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    folder = save(tmp_path, ema=saved)
    load(folder, ema=fresh)
    assert torch.equal(saved.weight, fresh.weight)
    assert "ema.weight" in FileSystemReader(folder).read_metadata().state_dict_metadata


def test_a_value_without_a_place_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path, net=torch.nn.Linear(3, 1))
    with pytest.raises(UsageError, match=r"no place for at the start: net\.bias"):
        load(folder, net=torch.nn.Linear(3, 1, bias=False))


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        engine.TrainState(model=torch.nn.Linear(2, 2), extra={name: Part(1)})


def test_what_differs_between_ranks_is_written_by_each_and_else_once() -> None:
    digests = [{"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "1"}]
    written = [own.entries({"a": b"", "b": b""}, digests, rank) for rank in range(3)]
    assert [sorted(entries) for entries in written] == [
        ["extra/a/all", "extra/b/rank-00000"],
        ["extra/b/rank-00001"],
        ["extra/b/rank-00002"],
    ]
    names = [name for entries in written for name in entries]
    assert [own.key_in(names, "a", rank) for rank in (0, 5)] == ["extra/a/all", "extra/a/all"]
    assert [own.key_in(names, "b", rank) for rank in (1, 5)] == ["extra/b/rank-00001", "extra/b/rank-00002"]
    assert own.key_in(names, "c", 0) is None


@pytest.mark.parametrize("where", ["read_data", "read_metadata"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(code, "the disk says no", "/fsx/__0_0.distcp")

    folder = save(tmp_path, x=Part(1))
    monkeypatch.setattr(VerifiedReader, where, broken)
    with pytest.raises(StoreUnreadableError, match="the disk says no"):
        load(folder, x=Part(0))


def test_random_states_that_cannot_be_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path)
    (folder / rng.file_name(0)).unlink()
    with pytest.raises(DamagedFileError, match="missing"):
        load(folder)
    (folder / rng.file_name(0)).mkdir()
    with pytest.raises(StoreUnreadableError):
        load(folder)


def test_an_error_of_the_scripts_own_object_stays_its_own(tmp_path: Path) -> None:
    class Lacks(Part):
        def load_state_dict(self, state: Any) -> None:
            raise FileNotFoundError("index.bin")

    folder = save(tmp_path, x=Part(1))
    with pytest.raises(FileNotFoundError):
        load(folder, x=Lacks(0))


def test_damage_that_cannot_be_unpickled_is_told_as_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, x=Part({"best": 1.0}))
    (data,) = folder.glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(DamagedFileError, match="CRC64-NVME"):
        load(folder, x=Part({"best": 0.0}))
