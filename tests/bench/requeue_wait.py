"""Measure the wait from the end of an attempt to its restart, three ways in one run, on real private Slurms.

As ParallelCluster ships it (cred_expire=70), with cred_expire=20, and with `pctool nudge --watch` beside it. Times are
not scaled. Takes about a minute and a half.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pctool.cluster.view import load_view
from pctool.slurm.private import PrivateCluster

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
SCRIPT = """#!/bin/bash
date +%s.%N >> {stamps}
[[ -n "${{SLURM_RESTART_COUNT:-}}" ]] && exit 0
date +%s.%N >> {stamps}
exit 85
"""


@dataclass(frozen=True)
class Way:
    """One way to wait: CustomSlurmSettings besides the config's, and whether nudge runs."""

    name: str
    settings: Mapping[str, str]
    nudged: bool = False


WAYS = (
    Way("cred_expire=70 (shipped)", {}),
    Way("cred_expire=20", {"AuthInfo": "cred_expire=20"}),
    Way("nudge --watch", {}, nudged=True),
)


def begin(way: Way, stack: ExitStack, folder: Path) -> tuple[Way, Path]:
    """Start a cluster and its job; return where the job writes its times."""
    view = load_view(ROOT / "cluster-configs/p5-spot.yaml")
    view = replace(view, slurm_settings=(*view.slurm_settings, *way.settings.items()))
    cluster = stack.enter_context(PrivateCluster.start(view, nodes=1))
    environ = {**os.environ, **cluster.env}
    stamps = folder / f"{len(list(folder.iterdir()))}.stamps"
    stamps.touch()
    script = SCRIPT.format(stamps=stamps)
    argv = ["sbatch", "-N1", "--requeue", f"--comment=pctool:{folder}", "--output=/dev/null"]
    subprocess.run(argv, input=script, env=environ, text=True, check=True, capture_output=True)
    if way.nudged:
        watch = [sys.executable, "-m", "pctool", "nudge", "--watch"]
        process = subprocess.Popen(watch, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
    return way, stamps


def wait(stamps: Path) -> float:
    """Return the seconds between the end of the first start and the second."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        times = [float(line) for line in stamps.read_text().split()]
        if len(times) >= 3:
            return times[2] - times[1]
        time.sleep(0.1)
    raise TimeoutError(f"the job did not restart in {LIMIT_S:g} s")


def main() -> None:
    """Measure and print."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        begun = [begin(way, stack, folder) for way in WAYS]
        rows = [{"way": way.name, "end_to_restart_s": round(wait(stamps), 2)} for way, stamps in begun]
    shipped = float(str(rows[0]["end_to_restart_s"]))
    ratios = {str(row["way"]): round(float(str(row["end_to_restart_s"])) / shipped, 3) for row in rows}
    print(json.dumps({"machine": platform.platform(), "rows": rows, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
