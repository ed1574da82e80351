"""Measure how long `pctool --help` takes beside `python -c 'import argparse'`, turn by turn in one run.

usage: python tests/bench/startup.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = {
    "python": [sys.executable, "-c", ""],
    "argparse": [sys.executable, "-c", "import argparse"],
    "pctool --help": [str(Path(sys.executable).with_name("pctool")), "--help"],
    "python -m pctool --help": [sys.executable, "-m", "pctool", "--help"],
    "pctool rehearse --help": [str(Path(sys.executable).with_name("pctool")), "rehearse", "--help"],
}


def main(rounds: int) -> None:
    """Print seconds and ratios as JSON."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, argv in PROGRAMS.items():
            times[name].append(_seconds(argv))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [{"program": name, "median_s": medians[name], "min_s": min(times[name])} for name in PROGRAMS]
    ratios = {name: medians[name] / medians["argparse"] for name in PROGRAMS}
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}, indent=2))


def _seconds(argv: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
