"""The reader: whatever a state is loaded into, every value is there; or the damaged file is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint_harness import save
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pctool.checkpoint import reader
from pctool.checkpoint import torch as engine
from pctool.checkpoint.group import Group
from pctool.checkpoint.image import Wrapping, wrapping
from pctool.checkpoint.manifest import read_manifest
from pctool.run.layout import RunDir


class Holder(torch.nn.Module):
    """A module of buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def various() -> dict[str, torch.Tensor]:
    """Return tensors that take several reads, share one, and need other ways."""
    small = {f"small{number}": torch.randn(3) for number in range(400)}  # more parts than one call takes, under 1 MiB
    return small | {
        "large": torch.randn(3 * reader.CHUNK // 4 + 1),
        "bfloat": torch.randn(1000).to(torch.bfloat16),
        "flags": torch.rand(1001) > 0.5,
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(300, 200),
        "sparse": torch.eye(4).to_sparse(),
    }


def load(folder: Path, into: torch.nn.Module) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    engine.load(engine.TrainState(model=into), folder, manifest, Group())


def check(found: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    for name, value in found.state_dict().items():
        assert torch.equal(value.to_dense(), saved[name].to_dense()), name


def blank(saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    fresh = {name: torch.zeros_like(value) for name, value in saved.items()}
    return fresh | {"turned": torch.zeros(200, 300).t()}  # not in the order in which it is stored


def test_all_values_come_back_whatever_they_are_loaded_into(tmp_path: Path) -> None:
    saved = various()
    folder = save(RunDir(tmp_path), engine.TrainState(model=Holder(saved)), 1)[0]
    found = Holder(blank(saved))
    load(folder, found)
    check(found, saved)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    folder = save(RunDir(tmp_path), engine.TrainState(model=Holder({"x": torch.tensor([1.5, 2.5])})), 1)[0]
    found = Holder({"x": torch.zeros(2, dtype=torch.float64)})
    load(folder, found)
    check(found, {"x": torch.tensor([1.5, 2.5], dtype=torch.float64)})


def test_what_another_torch_wrote_is_read_by_torch_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = various()
    folder = save(RunDir(tmp_path), engine.TrainState(model=Holder(saved)), 1)[0]
    found = Holder(blank(saved))

    def of_another(dtype: torch.dtype, shape: tuple[int, ...]) -> Wrapping:
        """Return one of the same length, with the data in another place."""
        ours = wrapping(dtype, shape)
        return Wrapping(ours.head + b"?" * 8, ours.tail[8:])

    monkeypatch.setattr(reader, "wrapping", of_another)
    load(folder, found)
    check(found, saved)


@pytest.mark.parametrize("name", ["large", "small7", "turned", "sparse"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_one_wrong_byte_is_damage_wherever_it_lies(tmp_path: Path, name: str, share: float) -> None:
    """In the values, or around them, where torch's own reader would stumble over it."""
    saved = various()
    folder = save(RunDir(tmp_path), engine.TrainState(model=Holder(saved)), 1)[0]
    places = FileSystemReader(folder).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == f"model.{name}")
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + int(place.length * share)] ^= 1
    path.write_bytes(data)
    with pytest.raises(reader.DamagedFileError, match="__0_0"):
        load(folder, Holder(blank(saved)))
