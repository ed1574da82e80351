"""Measure checkpoints beside a memcpy, raw files, torch.save, DCP and bare boto3, turn by turn in one run.

    python tests/bench/checkpoint.py [--mib-per-rank 512] [--ranks 2] [--pairs 11] [--folder DIR] [--quick] [--json]

Real ranks over gloo; a model of sharded matrices with AdamW, so many MiB a rank in all. A row's time is the slowest
rank's. A ratio is the median of the turns' own, with its quartiles; where the baseline's quartiles lie over 15 % apart
it is inconclusive. Cold reads: each file fsynced and dropped from the page cache before. S3 is a loopback sink
(s3_sink.py), in a process of its own, over plain HTTP: it shows what a client costs, and nothing of the network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import s3_sink

from pctool.checkpoint.deliver import FILES_AT_ONCE
from pctool.checkpoint.mirror import Mirror
from pctool.checkpoint.s3store import S3Store
from pctool.checkpoint.stores import store_key
from pctool.run.layout import RunDir

HERE = Path(__file__).parent
UNSTEADY = 1.15  # q3/q1 of a baseline
# ratio -> (ours, baseline)
PAIRS = {
    "stall": ("ours: stall", "memcpy"),
    "durable": ("ours: durable", "raw write + fsync"),
    "durable_direct": ("ours: durable", "raw write + fsync, O_DIRECT"),
    "stall_dcp_async": ("ours: stall", "dcp.async_save ({kind}): stall"),
    "durable_dcp_async": ("ours: durable", "dcp.async_save ({kind}): durable"),
    "restore": ("ours: restore, cold", "raw read, cold"),
    "restore_warm": ("ours: restore, warm", "raw read, warm"),
    "restore_dcp": ("ours: restore, cold", "dcp.load, cold"),
    "restore_s3": ("ours: restore from S3", "boto3 download"),
    "mirror": ("ours: mirror", "boto3 upload"),
    "throughput": ("train, a save behind", "train"),
}


def own(pid: int) -> int:
    """Return a process's memory in bytes without what is shared memory, its files in proportion; 0 once it has gone."""
    return _kib(pid, "smaps_rollup", ("Pss_Anon:", "Pss_File:"))


def shared(pid: int) -> int:
    """Return the shared memory that a process has mapped and touched, in bytes."""
    return _kib(pid, "status", ("RssShmem:",))


def _kib(pid: int, file: str, keys: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(keys))


def drop(folder: Path) -> None:
    """Have the page cache forget a folder's files."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Watch(threading.Thread):
    """The memory of processes and all below them, until they say that it is enough."""

    def __init__(self, pids: list[int], enough: Path) -> None:
        super().__init__(daemon=True)
        self.pids, self.enough = pids, enough
        self.seen: list[tuple[float, int]] = []

    def run(self) -> None:
        """Look twenty times a second."""
        while not self.enough.exists():
            began = time.monotonic()
            # a rank has all of its shared memory mapped. In proportion, looked at one process after the other while
            # a writer maps page upon page, some of it would count twice
            self.seen.append((began, sum(map(own, _tree(self.pids))) + sum(map(shared, self.pids))))
            time.sleep(0.05)

    def peak(self, began: float, ended: float) -> int:
        """Return the most that was seen between two times, in bytes."""
        return max(size for at, size in self.seen if began <= at <= ended)


def _tree(pids: list[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


class Ranks:
    """The ranks of one part; what they print is shown if one fails."""

    def __init__(self, part: str, folder: Path, args: argparse.Namespace, count: int) -> None:
        self.answer, self.log = folder / f"{part}.json", folder / f"{part}.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        sizes = [str(args.mib_per_rank), str(args.pairs)]
        command = [sys.executable, str(HERE / "checkpoint_ranks.py"), part, str(folder), *sizes]
        with self.log.open("w") as log:
            self.running = [
                subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=log, stderr=log)
                for rank in range(count)
            ]

    def end(self) -> dict[str, Any]:
        """Wait for them; return what rank 0 measured. If one fails, the others are killed."""
        while any(rank.poll() is None for rank in self.running) and not any(rank.poll() for rank in self.running):
            time.sleep(0.05)
        for rank in self.running:
            rank.kill()
        if any(rank.wait() for rank in self.running):
            raise SystemExit(f"a rank failed:\n{self.log.read_text()}")
        found: dict[str, Any] = json.loads(self.answer.read_text())
        return found


def measure_mirror(folder: Path, ranks: int, pairs: int) -> dict[str, list[float]]:
    """Measure the mirror and a bare upload of the same files with as many requests at once, both from cold files."""
    import boto3
    from s3transfer.manager import TransferConfig, TransferManager

    run, key = RunDir(folder / f"run-{ranks}"), "store"
    checkpoint = next(run.checkpoints.glob("0*"))
    config = TransferConfig(max_request_concurrency=FILES_AT_ONCE, multipart_chunksize=32 << 20)

    def ours(turn: int) -> None:
        store = S3Store(f"s3://drop-{turn}/{key}", store_key(run))
        assert Mirror(run, store, 0).poke()

    def bare(turn: int) -> None:
        client: Any = boto3.session.Session().client("s3")
        with TransferManager(client, config) as manager:
            files = list(checkpoint.iterdir())
            for done in [manager.upload(str(path), f"drop-{turn}", f"bare/{path.name}") for path in files]:
                done.result()

    found: dict[str, list[float]] = {"ours: mirror": [], "boto3 upload": []}
    for turn in range(pairs + 1):
        ways = [("ours: mirror", ours), ("boto3 upload", bare)]
        for name, way in ways if turn % 2 else ways[::-1]:
            drop(checkpoint)
            began = time.perf_counter()
            way(turn)
            found[name] += [time.perf_counter() - began] if turn else []  # the first one warms up
    return found


def measure(
    args: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[float]], dict[str, Any], list[dict[str, Any]]]:
    """Measure all; return the times by row, what else the ranks said, and the rows of memory."""
    with s3_sink.running(folder) as environ:
        os.environ.update(environ)
        ranks = Ranks("saves", folder, args, args.ranks)
        watch = Watch([rank.pid for rank in ranks.running], folder / "watched")
        watch.start()
        said = ranks.end()
        times = said["times"] | measure_mirror(folder, args.ranks, args.pairs)
        times |= Ranks("training", folder, args, 1).end()["times"]
    memory = [
        {
            "row": f"{name}: memory",
            "peak_extra_mb": (peak := watch.peak(seen["began"], seen["ended"]) - seen["before"]) / 1e6,
            "to_state": peak / said["bytes"],
            "first_save": seen["first"],
        }
        for name, seen in said["memory"].items()
    ]
    return times, said, memory


def rows_of(times: dict[str, list[float]], size: int) -> list[dict[str, Any]]:
    """Return median and quartiles of each row; GiB a second over all ranks where it moves the state."""
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        row = {"row": name, "median": middle, "q1": low, "q3": high, "unit": "1/s" if name.startswith("train") else "s"}
        rows.append(row | ({"GiB_per_s": size / middle / 2**30} if row["unit"] == "s" else {}))
    return rows


def compared(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the ratios, each with its quartiles and whether its baseline was steady."""
    name = "dcp.async_save ({kind}): stall"
    kinds = [kind for kind in ("thread", "process") if name.format(kind=kind) in times]
    kind = min(kinds, key=lambda kind: statistics.median(times[name.format(kind=kind)]))  # torch's better one
    rows = []
    for ratio, (ours, template) in PAIRS.items():
        baseline = template.format(kind=kind)
        pairs = [one / other for one, other in zip(times[ours], times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
        first, _, third = statistics.quantiles(times[baseline], n=4, method="inclusive")
        row = {"row": f"{ours} / {baseline}", "ratio": ratio, "median": middle, "q1": low, "q3": high}
        rows.append(row | ({"note": "inconclusive"} if third / first > UNSTEADY else {}))
    return rows


def printed(answer: dict[str, Any]) -> str:
    """Return a table."""
    lines = [str(answer["machine"])]
    for row in answer["rows"]:
        figures = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else str(value)
            for key, value in row.items()
            if key not in {"row", "first_save"}
        )
        lines.append(f"{row['row']:<60} {figures}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure checkpoints.")
    parser.add_argument("--mib-per-rank", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--folder", type=Path, help="a folder of the file system to measure (default: TMPDIR)")
    parser.add_argument("--quick", action="store_true", help="small and few: it shows that this runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.mib_per_rank, args.pairs = 4, 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        times, said, memory = measure(args, Path(name))
    answer = report(args, times, said, memory)
    print(json.dumps(answer) if args.json else printed(answer))


def report(
    args: argparse.Namespace, times: dict[str, list[float]], said: dict[str, Any], memory: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what `--json` prints."""
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    machine |= {"ranks": args.ranks, "state_mib": said["bytes"] >> 20, "pairs": args.pairs, "s3": "loopback sink"}
    ratios = compared(times)
    first = [{"row": f"{key}, first save", "median": value} for key, value in memory[0]["first_save"].items()]
    skipped = (
        [] if importlib.util.find_spec("s3torchconnector") else [{"row": "s3torchconnector", "note": "not installed"}]
    )
    rows = [*rows_of(times, said["bytes"]), *first, *memory, *skipped, *ratios]
    found = {row["ratio"]: round(row["median"], 4) for row in ratios} | {"memory": round(memory[0]["to_state"], 4)}
    return {"machine": machine, "rows": rows, "ratios": found}


if __name__ == "__main__":
    main()
