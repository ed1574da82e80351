"""Every kind of value that a state may hold comes back equal bit by bit, through pctool's load and torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_harness import save
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.plain import PlainState
from pctool.checkpoint.reader import VerifiedReader
from pctool.checkpoint.torch import quiet
from pctool.run.layout import RunDir

LONG = "k" * 5000


def odd_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of arbitrary bits: also NaNs with a payload, denormals, negative zeros."""
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.arange(size, dtype=torch.int64).mul(97).add(13).to(torch.uint8).view(dtype).view(shape)


def tensors() -> dict[str, torch.Tensor]:
    base = odd_bits(torch.float32, 6, 4)
    floats = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128]
    kinds = {str(dtype): odd_bits(dtype, 3, 4) for dtype in [*floats, torch.int8, torch.int16, torch.int64]}
    return {
        **kinds,
        "bool": torch.tensor([True, False, True]),
        "none of it": torch.empty(0),
        "none of it in 3 dimensions": torch.empty(2, 0, 3, dtype=torch.bfloat16),
        "0-dim": torch.tensor(3.5),
        "transposed": base.t(),
        "channels last": odd_bits(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 1000),
        "sliced": base[1::2, 1:3],
        "offset": base[2:],
        "tied": base,
        "tied too": base,
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.arange(5.0)),
        "without gradient": torch.nn.Parameter(torch.arange(5), requires_grad=False),
        "result": torch.nn.Parameter(torch.arange(5.0)) * 2,
        LONG: torch.ones(3),
    }


def beyond_torch() -> dict[str, Any]:
    """Return what torch's own reader leaves as it was without a word, or its conversion fails of, or changes."""
    return {
        "dict": {3: {"x": {}}, "y": {}},
        "sparse": torch.eye(4).to_sparse(),
        "sparse of nothing": torch.zeros(4, 4).to_sparse(),
        "compressed": torch.eye(4).to_sparse_csr(),
    }


def plain() -> dict[str, Any]:
    return {
        "int": 7,
        "int beyond 64 bits": 2**80 + 1,
        "negative": -(2**70),
        "none": None,
        "text": "α β\n\0",
        "tuple": (1, (2.5, "x"), None),
        "lists": [[1, [2, [3, torch.arange(3)]]], []],
        "dict": {"a": {"b": [torch.ones(2, dtype=torch.bfloat16)]}},
        "bytes": b"\0\xff",
        "float": float("inf"),
        "set": {1, 2},
        "dtype": torch.float32,
    }


def bits(value: torch.Tensor) -> bytes:
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    return bytes(dense.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bits(one) == bits(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def blank(value: Any) -> Any:
    """Return what is to be loaded into."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype) if value.layout == torch.strided else value.clone() * 0
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    if isinstance(value, list):
        return [blank(part) for part in value]
    return None


def by_pctool(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    manifest = mf.read_manifest(folder)
    assert manifest is not None
    with quiet():
        dcp_load(into, storage_reader=VerifiedReader(folder, manifest), no_dist=True)
    return into


def by_torch(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    with quiet():
        dcp_load(into, storage_reader=FileSystemReader(folder), no_dist=True)
    return into


def by_conversion(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    with quiet():
        dcp_to_torch_save(folder, folder.parent / "all.pt")
    found: dict[str, Any] = torch.load(folder.parent / "all.pt", weights_only=False)
    return found


@pytest.mark.parametrize("load", [by_pctool, by_torch, by_conversion])
def test_values_come_back_bit_by_bit(load: Callable[[Path, dict[str, Any]], dict[str, Any]], tmp_path: Path) -> None:
    check({"tensors": tensors(), "plain": plain()}, load, tmp_path)


def test_what_torch_itself_loses_comes_back(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        check({"beyond": beyond_torch()}, by_pctool, tmp_path)


def check(state: dict[str, Any], load: Callable[[Path, dict[str, Any]], dict[str, Any]], tmp_path: Path) -> None:
    for folder in save(RunDir(tmp_path), PlainState(state), 1, 2):  # the second one with what is kept of the first
        found = load(folder, {part: blank(value) for part, value in state.items()})
        for part, values in state.items():
            for name, value in values.items():
                assert same(value, found[part][name]), f"{part} {name[:40]}: {value} became {found[part][name]}"
