"""EC2 instance types, from the table beside this file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from pctool.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "instances.toml"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance type. Memory in MiB; `gpu` as Slurm's Gres names the model, None without NVIDIA GPUs."""

    name: str
    arch: str  # x86_64 | arm64
    vcpus: int
    cores: int  # physical
    memory_mib: int
    network_cards: int
    efa: int  # the most EFA interfaces it takes; 0: no EFA
    gpu: str | None = None
    gpus: int = 0
    gpu_memory_mib: int = 0  # of one GPU


def parse_table(text: str) -> dict[str, Instance]:
    """Read the table's TOML; raise ValueError naming the row for a missing, unknown or mistyped key."""
    return {name: _row(name, row) for name, row in tomllib.loads(text).items()}


def _row(name: str, row: Mapping[str, Any]) -> Instance:
    known = {field.name: field for field in fields(Instance)}
    for key, value in row.items():
        wants = str if key in {"arch", "gpu"} else int
        if key not in known or type(value) is not wants:
            raise ValueError(f"{TABLE}: {name}: bad key or value: {key} = {value!r}")
    try:
        return Instance(name=name, **row)
    except TypeError as error:
        raise ValueError(f"{TABLE}: {name}: {error}") from None


@cache
def instances() -> Mapping[str, Instance]:
    """Return every known instance type by name."""
    text = resources.files("pctool.facts").joinpath(TABLE).read_text(encoding="utf-8")
    return MappingProxyType(parse_table(text))


def instance(name: str, *, where: str | None = None) -> Instance:
    """Return one instance type; raise UsageError with the nearest known name otherwise.

    `where` is the place in the user's file, for the message.
    """
    found = instances().get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, instances(), n=1)
    fix = f"did you mean {near[0]}?" if near else f"the types known here are listed in pctool/facts/{TABLE}"
    raise UsageError(f"instance type {name!r} is not known", where=where, fix=fix)
