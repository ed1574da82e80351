"""The image of a data file in memory is what torch.save would have written, and plain DCP reads it."""

from __future__ import annotations

import io

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from pctool.checkpoint.image import has_fixed_form, lay_out, serialise, wrapping

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8)
SHAPES = ((), (0,), (1,), (3, 5), (70_000,), (1, 2, 3, 4, 5, 6), (0, 7))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_wrapping_and_the_bytes_are_an_archive_that_torch_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(torch.Size(shape).numel())
    tensor = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8) % 2
    value = tensor.view(dtype).reshape(shape)
    around = wrapping(dtype, shape)
    loaded = torch.load(io.BytesIO(around.head + raw(value) + around.tail), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, value.shape)
    assert raw(loaded) == raw(value)
    assert len(around.head) % 64 == 0  # so that the data is aligned for every dtype


def test_the_wrapping_of_a_tensor_beyond_four_gigabytes_needs_no_memory_for_it() -> None:
    around = wrapping(torch.uint8, (5 << 30,))
    assert len(around.head) + len(around.tail) < 4096


def test_entries_lie_one_behind_the_other_what_has_no_fixed_form_last() -> None:
    values = [torch.ones(3), "text", torch.ones(5, dtype=torch.bool), torch.eye(2).to_sparse()]
    kinds = [WriteItemType.TENSOR, WriteItemType.BYTE_IO, WriteItemType.TENSOR, WriteItemType.TENSOR]
    indices = [MetadataIndex(str(number)) for number in range(4)]
    image = lay_out([WriteItem(index=i, type=kind) for i, kind in zip(indices, kinds, strict=True)], values)
    assert [slot.index.fqn for slot in image.slots] == ["0", "2"]
    assert [index.fqn for index in image.loose] == ["1", "3"]
    assert all(slot.start % 64 == 0 and slot.data % 64 == 0 for slot in image.slots)
    places = dict(image.places("__0_0.distcp", [10, 20]))
    assert (places[indices[1]].offset, places[indices[1]].length) == (image.fixed, 10)
    assert places[indices[3]].offset == image.fixed + 10
    ends = [info.offset + info.length for _, info in image.places("f", [10, 20])]
    starts = [info.offset for _, info in image.places("f", [10, 20])]
    assert all(end <= start for end, start in zip(sorted(ends), sorted(starts)[1:], strict=False))


def test_a_tensor_that_shows_a_part_of_its_storage_is_saved_without_the_rest() -> None:
    part = torch.zeros(1_000_000)[5:8]
    assert len(serialise(part)) < 10_000
    assert torch.equal(torch.load(io.BytesIO(serialise(part)), weights_only=True), part)


def test_what_torch_saves_in_another_way_has_no_fixed_form() -> None:
    assert has_fixed_form(torch.ones(2, 3).T)
    assert has_fixed_form(torch.nn.Parameter(torch.ones(2)))
    assert not has_fixed_form(torch.eye(2).to_sparse())
    assert not has_fixed_form(torch.ones(2, dtype=torch.complex64).conj())
    assert not has_fixed_form(3)
