"""Write the safetensors format, tensor by tensor: the package's own writer wants all of them in memory at once.

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), and the
data. Tensors lie one after the other without gaps. Source: README of the safetensors repository, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pctool.errors import UsageError

# torch's name of a type, without `torch.` -> the format's name, bytes an element
TYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_ALIGN = 8  # the header is padded with spaces to it, so that a mapped file's data is aligned


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor before its data: torch's name of its type (`bfloat16`), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the size of its data."""
        count = 1
        for length in self.shape:
            count *= length
        return count * TYPES[self.dtype][1]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The bytes that the file begins with, the order in which the tensors' data follow, and the whole file's size."""

    head: bytes
    order: tuple[str, ...]
    bytes: int


def lay_out(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> Layout:
    """Return the layout of a file with these tensors. Raise UsageError for a type that the format does not have."""
    for name, info in tensors.items():
        if info.dtype not in TYPES:
            raise UsageError(
                f"tensor {name} is {info.dtype}, which safetensors does not have",
                fix="export to OUT.pt, or use --dtype",
            )
    # the widest types first keeps each tensor aligned to its own type
    order = sorted(tensors, key=lambda name: (-TYPES[tensors[name].dtype][1], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        info = tensors[name]
        header[name] = {
            "dtype": TYPES[info.dtype][0],
            "shape": list(info.shape),
            "data_offsets": [at, at + info.bytes],
        }
        at += info.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    return Layout(head=head, order=tuple(order), bytes=len(head) + at)
