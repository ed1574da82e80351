"""Measure the way from a notice to "every rank knows": real launches and the real channel, sleeping ranks.

    python tests/bench/fanout.py [--nodes 4 64 256] [--rounds 5] [--json]

A node is one `pctool launch` process with a stand-in for torchrun that does nothing. Measured in each round:
  notice     from the notice in the fake instance metadata until the last page is set (includes the 2 s poll)
  detection  from the launch's detection (`seen` in the ledger) until the last page is set: the channel alone
The stop file is hidden all the time, as on a shared file system that shows it 60 s late: nobody writes it at all.
File-system operations on the run directory are counted with strace on node 0's launch and on one other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pctool.aws.fake_imds import FakeImds
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.page import Page
from pctool.run.records import Claim, claim_bytes

LOOK_S = 0.001  # between two looks at the pages
LIMIT_S = 300.0
STRACE_S = 20

NODE = """
import os, signal, sys
from dataclasses import replace
from pctool.node.config import read_config
from pctool.node.launch import Launch
config = read_config(os.environ, per_node=1, python=sys.executable, script=[sys.argv[1]], stop_signal=None,
                     poll_s=float(sys.argv[2]))
config = replace(config, module="fanout_sleeper")
sys.exit(Launch(config, emit=lambda text: None).run())
"""
# Stands in for torchrun and its ranks: becomes `sleep`, so that 256 of them fit on a small machine.
SLEEPER = "import os\nos.execvp('sleep', ['sleep', '100000'])\n"


@dataclass(frozen=True)
class Round:
    """One measured fan-out, in seconds."""

    notice: float
    detection: float
    armed: float


class Nodes:
    """N launches of one attempt on this machine."""

    def __init__(self, folder: Path, *, nodes: int, poll_s: float) -> None:
        self.names = [f"n{node}" for node in range(nodes)]
        self.run = RunDir(folder / "run")
        self.attempt = self.run.attempt(0)
        self.attempt.path.mkdir(parents=True)
        self.imds = FakeImds()
        (folder / "fanout_sleeper.py").write_text(SLEEPER)
        script = folder / "script.py"
        script.touch()
        with socket.create_server(("127.0.0.1", 0)) as server:
            hub = f"127.0.0.1:{server.getsockname()[1]}"
        names = tuple(self.names)
        claim = Claim(job_id="1", restart=0, nonce="bench", host="n0", nodes=names, time=time.time(), hub=hub)
        self.attempt.claim.write_bytes(claim_bytes(claim))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", NODE, str(script), str(poll_s)],
                env=self._environ(node, hub, folder),
                stdout=subprocess.DEVNULL,
            )
            for node in range(nodes)
        ]
        self.pages: list[Page] = []

    def _environ(self, node: int, hub: str, folder: Path) -> dict[str, str]:
        name = self.names[node]
        endpoint = self.imds.add(name, instance_id=f"i-{node}", instance_type="x", availability_zone="us-east-1a")
        return {
            **os.environ,
            "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}",
            "SLURM_JOB_ID": "1",
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_NODES": str(len(self.names)),
            "SLURMD_NODENAME": name,
            "PCTOOL_RUN_DIR": str(self.run.path),
            "PCTOOL_ATTEMPT": "0",
            "PCTOOL_NONCE": "bench",
            "PCTOOL_HUB": hub,
            "PCTOOL_NOTICE_FILE": str(folder / "none.json"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint,
        }

    def wait_started(self) -> float:
        """Wait until every launch has started its stand-in; return the seconds since the claim."""
        deadline = time.monotonic() + LIMIT_S
        records: list[dict[str, Any]] = []
        while len(records) < len(self.names):
            if time.monotonic() > deadline:
                raise SystemExit(f"only {len(records)} of {len(self.names)} launches started")
            time.sleep(0.2)
            records = [record for name in self.names if (record := _start_record(self.attempt.node_start(name)))]
        self.pages = [Page.open(record["page"]) for record in records]
        return float(Ledger(self.run.ledger).read()[0].fields["seconds"])

    def fan_out(self, node: int) -> Round:
        """Give one node a notice and time until all pages are set."""
        self.imds.notice(self.names[node], when=datetime.now(timezone.utc) + timedelta(seconds=120))
        noticed = time.time()
        while not all(page.stop_requested for page in self.pages):
            time.sleep(LOOK_S)
            if time.time() - noticed > LIMIT_S:
                raise SystemExit("not every page was set")
        known = time.time()
        events = self._events_until("stop-armed")
        seen = float(events["notice"].fields["seen"])
        return Round(known - noticed, known - seen, float(events["stop-armed"].fields["seconds"]))

    def _events_until(self, name: str) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            events = {event.event: event for event in Ledger(self.run.ledger).read()}
            if name in events:
                return events
            time.sleep(0.05)
        raise SystemExit(f"no {name} in the ledger")

    def operations(self, node: int) -> float | None:
        """Return the file-system calls a second that one launch makes on the run directory; None without strace."""
        if shutil.which("strace") is None:
            return None
        with tempfile.NamedTemporaryFile("r") as trace:
            command = ["strace", "-f", "-y", "-qq", "-e", "trace=%file,%desc", "-o", trace.name]
            tracer = subprocess.Popen([*command, "-p", str(self.processes[node].pid)], stderr=subprocess.DEVNULL)
            time.sleep(STRACE_S)
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
            calls = sum(str(self.run.path) in line for line in trace)
        return calls / STRACE_S

    def close(self) -> None:
        """End everything."""
        for page in self.pages:
            page.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.imds.close()


def _start_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record if record["torchrun_pid"] else None


def measure(nodes: int, *, rounds: int, poll_s: float) -> dict[str, Any]:
    """Measure one size. Each round is a gang of its own, since an attempt stops only once."""
    results: list[Round] = []
    hub: float | None = None
    peer: float | None = None
    started = 0.0
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            gang = Nodes(Path(folder), nodes=nodes, poll_s=poll_s)
            try:
                started = gang.wait_started()
                if number == 0:
                    hub, peer = gang.operations(0), gang.operations(nodes - 1)
                results.append(gang.fan_out(1 + number % (nodes - 1)))
            finally:
                gang.close()
    return {
        "nodes": nodes,
        "rounds": rounds,
        "gather_s": round(started, 2),
        "notice_to_all_median_s": round(statistics.median(r.notice for r in results), 3),
        "notice_to_all_worst_s": round(max(r.notice for r in results), 3),
        "detection_to_all_median_s": round(statistics.median(r.detection for r in results), 3),
        "detection_to_all_worst_s": round(max(r.detection for r in results), 3),
        "armed_worst_s": round(max(r.armed for r in results), 3),
        "run_dir_ops_per_s_node_0": hub,
        "run_dir_ops_per_s_other_node": peer,
        "run_dir_ops_per_s_all": None if hub is None or peer is None else round(hub + peer * (nodes - 1), 2),
        "launch_rss_max_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
    }


def main() -> None:
    """Measure the sizes asked for and print them."""
    parser = argparse.ArgumentParser(description="Measure the fan-out of a notice.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--poll-s", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(nodes, rounds=args.rounds, poll_s=args.poll_s) for nodes in args.nodes]
    first, last = rows[0], rows[-1]
    ratio = last["detection_to_all_median_s"] / max(first["detection_to_all_median_s"], 1e-9)
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    ratios = {f"detection_{last['nodes']}_over_{first['nodes']}_nodes": round(ratio, 2)}
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}))
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    print(ratios)


if __name__ == "__main__":
    main()
