"""Compare two checkpoints bit by bit: `python -m pctool.checkpoint.compare A B`.

Prints {"equal": bool, "differing": [names], "only_in_one": [names]}. Exit code 0 if equal, 1 if not, 4 if one of them
is not there, not complete, or not what its manifest says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pctool.checkpoint import manifest as mf
from pctool.errors import IncompleteError, NotFoundError, PctoolError


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return which entries of two checkpoints differ in any bit.

    Raises NotFoundError where one is not there, IncompleteError where a file is missing or not what its manifest says:
    every byte is checked first, as nothing can be said of what a damaged index or file holds.
    """
    for folder in (first, second):
        _check(folder)
    left, right = load_flat(first), load_flat(second)
    only = sorted(left.keys() ^ right.keys())
    differing = sorted(name for name in left.keys() & right.keys() if not _same(left[name], right[name]))
    return {"equal": not only and not differing, "differing": differing, "only_in_one": only}


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFoundError("no checkpoint here: there is no such folder", where=str(folder))
    verdict = mf.verify(folder)
    if not verdict.ok:
        raise IncompleteError(f"not a complete checkpoint: {verdict.why}", where=str(folder))


def load_flat(folder: Path) -> dict[str, Any]:
    """Load every entry of a DCP folder by its flat name, in this process alone."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from pctool.checkpoint.torch import quiet

    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else ""
        for name, entry in entries.items()
    }
    with quiet():
        load(state, storage_reader=reader, no_dist=True)
    return state


def _same(left: Any, right: Any) -> bool:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        # as bytes: two NaNs are equal if their bits are, and -0.0 is not 0.0
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    return type(left) is type(right) and bool(left == right)


def main(argv: Sequence[str]) -> int:
    """Run the comparison and print its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m pctool.checkpoint.compare", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args(argv)
    try:
        result = compare(args.first, args.second)
    except PctoolError as error:
        sys.stderr.write(f"compare: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
