"""Measure what the watcher costs an idle node: memory and CPU over a minute.

  python tests/bench/watcher.py [--seconds 60] [--json]

process  `pctool watch`: its resident set, and its CPU time as a share of one core
thread   the watcher inside launch: a process with launch's modules, without and with the watcher's thread
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from pctool.aws.fake_imds import FakeImds

ROOT = Path(__file__).parents[2]
# Prints its resident set and CPU time when it has all modules, and again at the end, with the thread running or not.
INSIDE = """
import json, os, sys, time
from pathlib import Path
import pctool.cli.launch
from pctool.node.watch import Looker, Watcher
from pctool.aws.imds import Imds
sys.path.insert(0, sys.argv[2])
from watcher import cpu_s, rss_mb
before = rss_mb(os.getpid()), cpu_s(os.getpid())
if sys.argv[3] == "with":
    looker = Looker(node="n", imds=Imds(os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]), notice_file=Path("/none"))
    Watcher(looker, on_notice=print, on_rebalance=print, on_first=lambda: None, log=print).start()
time.sleep(float(sys.argv[1]))
print(json.dumps([before, [rss_mb(os.getpid()), cpu_s(os.getpid())]]))
"""


def rss_mb(pid: int) -> float:
    """Return a process's resident set in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"no resident set of {pid}")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process(environ: dict[str, str], seconds: float) -> dict[str, object]:
    """Measure `pctool watch`; the CPU time of its start is left out."""
    watch = subprocess.Popen([sys.executable, "-m", "pctool", "watch", "--node", "n"], env=environ)
    try:
        time.sleep(5)
        before = cpu_s(watch.pid)
        time.sleep(seconds)
        share = (cpu_s(watch.pid) - before) / seconds
        return {"what": "process", "rss_mb": round(rss_mb(watch.pid), 1), "core_percent": round(share * 100, 2)}
    finally:
        watch.terminate()
        watch.wait()


def inside(environ: dict[str, str], seconds: float, which: str) -> tuple[float, float]:
    """Return by how many MB and CPU seconds a process with launch's modules grew in the time."""
    command = [sys.executable, "-c", INSIDE, str(seconds), str(Path(__file__).parent), which]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    (rss0, cpu0), (rss1, cpu1) = json.loads(done.stdout)
    return rss1 - rss0, cpu1 - cpu0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the watcher's cost.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    imds = FakeImds()
    endpoint = imds.add("n", instance_id="i-1", instance_type="x", availability_zone="us-east-1a")
    environ = {**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)}
    alone = process(environ, args.seconds)
    without, _ = inside(environ, 2.0, "without")
    grown, cpu = inside(environ, args.seconds, "with")
    thread = {
        "what": "thread",
        "rss_mb": round(grown - without, 1),
        "core_percent": round(cpu / args.seconds * 100, 2),
    }
    imds.close()
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    answer = {"machine": machine, "rows": [alone, thread], "ratios": {}}
    print(json.dumps(answer) if args.json else f"{alone}\n{thread}")


if __name__ == "__main__":
    main()
