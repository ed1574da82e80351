"""Measure a manifest of many shards: written, read and judged, against json alone on the same record.

usage: python tests/bench/manifest.py [RANKS] [ROUNDS]

A checkpoint of RANKS (8,192) ranks has two files a rank and DCP's index. `encode` makes MANIFEST's text, `decode` reads
it, `judge` compares it with the sizes that are there, `is_complete` does so on a folder with all the files (empty) in
it, `commit` is what rank 0's writer does once all ranks have written. Ratios are to json.dumps (encode) and json.loads
(decode, judge) of the same record; the commit has no counterpart there. The median of ROUNDS (9) counts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pctool.checkpoint import manifest as mf
from pctool.checkpoint.coordinator import Order, publish
from pctool.run.layout import RunDir, checkpoint_name

EMPTY = mf.FileEntry(size=0, crc64nvme=mf.crc64nvme([]))


def entries(ranks: int) -> dict[str, mf.FileEntry]:
    """Return the entries of a checkpoint's files."""
    names = [name for rank in range(ranks) for name in (f"__{rank}_0.distcp", f"rng-{rank:05d}.json")]
    return dict.fromkeys([*names, ".metadata"], EMPTY)


def seconds(action: Callable[[], object], rounds: int) -> float:
    """Return the median of what an action takes."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(ranks: int, rounds: int, root: Path) -> dict[str, float]:
    """Return the seconds that each part takes."""
    files = entries(ranks)
    manifest = mf.Manifest(
        run="/fsx/runs/gpt",
        attempt=0,
        step=1,
        parent=None,
        world_size=ranks,
        files=files,
        position={"loader_seeds": list(range(ranks))},
    )
    data = mf.encode(manifest)
    record, sizes = json.loads(data), dict.fromkeys(files, 0)
    run = RunDir(root)
    folder = run.checkpoints / checkpoint_name(0, 1)
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    order = Order(name=folder.name, step=1, began=0.0, fields={"parent": None, "world_size": ranks})

    def commit() -> None:
        (folder / mf.NAME).unlink(missing_ok=True)
        publish(run, 0, order, files)

    parts: dict[str, Callable[[], object]] = {
        "json.dumps": lambda: json.dumps(record),
        "json.loads": lambda: json.loads(data),
        "encode": lambda: mf.encode(manifest),
        "decode": lambda: mf.decode(data),
        "judge": lambda: mf.judge(data, sizes),
        "commit": commit,
        "is_complete": lambda: mf.is_complete(folder),
    }
    return {name: seconds(action, rounds) for name, action in parts.items()}


def main(ranks: int, rounds: int) -> None:
    """Print seconds and ratios as JSON."""
    with tempfile.TemporaryDirectory() as name:
        found = measure(ranks, rounds, Path(name))
    pairs = {"encode": "json.dumps", "decode": "json.loads", "judge": "json.loads"}
    ratios = {f"{over}/{under}": round(found[over] / found[under], 2) for over, under in pairs.items()}
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    rows = [{"part": part, "seconds": round(value, 5)} for part, value in found.items()]
    print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(given[0] if given else 8192, given[1] if len(given) > 1 else 9)
