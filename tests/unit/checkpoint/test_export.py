"""One file of a checkpoint: what torch.load and the safetensors package read back is what was saved."""

from __future__ import annotations

import fractions
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_harness import save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pctool.checkpoint import export as module
from pctool.checkpoint import fetch
from pctool.checkpoint import torch as engine
from pctool.checkpoint.export import Exported, Options, export_target
from pctool.checkpoint.fetch import NoRoomError
from pctool.checkpoint.safetensors import TYPES, TensorInfo, lay_out
from pctool.checkpoint.target import resolve
from pctool.errors import IncompleteError, NotFoundError, UsageError
from pctool.run.layout import RunDir


class Tied(torch.nn.Module):
    """A model with what is hard to export: tied weights, a scalar, an empty tensor, integers, a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("small", torch.ones(3, dtype=torch.bfloat16))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class Part:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Tied]:
    """Save one checkpoint of a model that was trained for a step, with optimizer, scheduler and an extra."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "gpt")
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.head(model.norm(model.embed(torch.arange(6)))).sum() * model.scale).backward()
    optimizer.step()
    state = engine.TrainState(
        model=model,
        optimizers=(optimizer,),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5),
        extra={"seen": Part({"shard": 7})},
    )
    save(run, state, 10)
    return run, model


def export(made: tuple[RunDir, Tied], out: Path, **options: Any) -> Exported:
    target = resolve(str(made[0].path), store=None)
    return export_target(target, out, Options(**options), lambda *_: lambda _: None)[1]


def flat(state: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {at: state}
    return {key: value for name, part in state.items() for key, value in flat(part, f"{at}/{name}").items()}


def test_a_torch_file_is_what_torch_itself_makes_of_it(made: tuple[RunDir, Tied], tmp_path: Path) -> None:
    done = export(made, tmp_path / "out.pt")
    dcp_to_torch_save(made[0].checkpoints / "000000-00000010", tmp_path / "theirs.pt")
    ours, theirs = (flat(torch.load(tmp_path / name)) for name in ("out.pt", "theirs.pt"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        same = torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
        assert same, key
    assert (done.left_out, done.bytes) == ({}, (tmp_path / "out.pt").stat().st_size)
    assert torch.load(tmp_path / "out.pt")["scheduler"]["step_size"] == 5


def test_a_part_alone_has_the_same_place_in_the_file(made: tuple[RunDir, Tied], tmp_path: Path) -> None:
    export(made, tmp_path / "out.pt", only="model")
    state = torch.load(tmp_path / "out.pt")
    assert list(state) == ["model"]
    fresh = Tied()
    fresh.load_state_dict(state["model"])
    assert torch.equal(fresh.head.weight, made[1].head.weight)
    with pytest.raises(NotFoundError) as caught:
        export(made, tmp_path / "none.pt", only="mdoel")
    assert caught.value.fix == "choose one of: extra/seen, model, optimizer, scheduler"
    export(made, tmp_path / "seen.pt", only="extra/seen")
    assert list(torch.load(tmp_path / "seen.pt")) == ["extra/seen/all"]


def test_another_type_is_for_the_models_floating_numbers_alone(made: tuple[RunDir, Tied], tmp_path: Path) -> None:
    export(made, tmp_path / "out.pt", dtype="bf16")
    state = torch.load(tmp_path / "out.pt")
    assert state["model"]["norm.weight"].dtype == torch.bfloat16
    assert state["model"]["norm.num_batches_tracked"].dtype == torch.int64
    kept = {tensor.dtype for tensor in flat(state["optimizer"]).values() if isinstance(tensor, torch.Tensor)}
    assert kept == {torch.float32}


def test_the_package_reads_our_safetensors(made: tuple[RunDir, Tied], tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    done = export(made, tmp_path / "out.safetensors")
    found = package.load_file(tmp_path / "out.safetensors")
    expected = {name: tensor for name, tensor in made[1].state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert found.keys() == expected.keys()  # tied ones under each of their names
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert done.left_out == {"model._extra_state.calls": "no tensor"}
    assert done.tensors == len(expected)
    with package.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    export(made, tmp_path / "half.safetensors", dtype="fp16")
    half = package.load_file(tmp_path / "half.safetensors")
    assert torch.equal(half["embed.weight"], made[1].embed.weight.half())
    assert half["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_one_entry_is_read_at_a_time(
    made: tuple[RunDir, Tied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[int] = []
    load = module._Source.load

    def counted(source: module._Source, keys: list[str]) -> dict[str, Any]:
        asked.append(len(keys))
        return load(source, keys)

    monkeypatch.setattr(module._Source, "load", counted)
    export(made, tmp_path / name)
    assert set(asked) == {1}


def test_the_package_reads_every_type_of_the_table(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    tensors = {name: torch.arange(3).to(getattr(torch, name)) for name in TYPES}
    layout = lay_out({name: TensorInfo(dtype=name, shape=(3,)) for name in TYPES}, {})
    data = b"".join(bytes(module._bytes_of(tensors[name])) for name in layout.order)
    (tmp_path / "all.safetensors").write_bytes(layout.head + data)
    assert len(layout.head + data) == layout.bytes
    found = package.load_file(tmp_path / "all.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_type_that_the_format_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match="tensor w is complex128"):
        lay_out({"w": TensorInfo(dtype="complex128", shape=(1,))}, {})


def test_what_torch_load_would_refuse_is_left_out_and_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    model = torch.nn.Linear(2, 2)
    odd = Part({"ratio": fractions.Fraction(1, 3), "plain": 4})
    save(run, engine.TrainState(model=model, scheduler=odd), 10)
    done = export((run, Tied()), tmp_path / "out.pt")
    assert list(done.left_out) == ["scheduler.ratio"]
    assert "fractions.Fraction" in done.left_out["scheduler.ratio"]
    assert torch.load(tmp_path / "out.pt")["scheduler"] == {"plain": 4}


def test_a_damaged_checkpoint_is_not_exported(made: tuple[RunDir, Tied], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "gpt")
    shutil.copytree(made[0].path, run.path)
    (shard,) = (run.checkpoints / "000000-00000010").glob("__*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IncompleteError, match=rf"damaged: {shard.name}: CRC64-NVME"):
        export((run, Tied()), tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_file_is_whole_or_not_there(
    made: tuple[RunDir, Tied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="there already"):
        export(made, out)

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_bytes_of", broken)
        with pytest.raises(OSError, match="No space"):
            export(made, out, force=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out.safetensors", b"mine")]
    export(made, out, force=True)
    assert out.read_bytes() != b"mine"


def test_room_is_looked_for_first(made: tuple[RunDir, Tied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_SPARE", 1 << 62)
    for name in ("out.pt", "out.safetensors"):
        with pytest.raises(NoRoomError, match="are free"):
            export(made, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out.bin", "nowhere/out.pt"])
def test_a_name_that_says_no_format_or_leads_nowhere_is_refused(
    made: tuple[RunDir, Tied], tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError):
        export(made, tmp_path / name)
