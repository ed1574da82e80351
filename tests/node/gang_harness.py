"""A gang of real launches on loopback, without Slurm: srun's part is played by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pctool.aws.fake_imds import FakeImds
from pctool.run.layout import RunDir
from pctool.run.ledger import Event, Ledger
from pctool.run.page import Page
from pctool.run.records import Claim, NodeExit, claim_bytes, read_node_exits

HERE = Path(__file__).parent
LIMIT_S = 60.0


class Gang:
    """N launches of one attempt."""

    def __init__(self, path: Path, *, nodes: int, per_node: int = 1, number: int = 0, **options: Any) -> None:
        self.run = RunDir(path / "run")
        self.attempt = self.run.attempt(number)
        self.attempt.path.mkdir(parents=True)
        self.nodes = nodes
        self.per_node = per_node
        self.options = options
        self.nonce = "5ca1ab1e"
        self.imds = FakeImds()
        self.names = [f"n{node}" for node in range(nodes)]
        for name in self.names:
            self.imds.add(name, instance_id=f"i-{name}", instance_type="p5.48xlarge", availability_zone="us-east-1a")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.hub = f"127.0.0.1:{server.getsockname()[1]}"
        claim = Claim(
            job_id="7", restart=0, nonce=self.nonce, host="n0", nodes=tuple(self.names), time=time.time(), hub=self.hub
        )
        self.attempt.claim.write_bytes(claim_bytes(claim))
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._err = path

    def environ(self, node: int) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "7",
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_NODES": str(self.nodes),
            "SLURMD_NODENAME": self.names[node],
            "PCTOOL_RUN_DIR": str(self.run.path),
            "PCTOOL_ATTEMPT": str(self.attempt.number),
            "PCTOOL_NONCE": self.nonce,
            "PCTOOL_HUB": self.hub,
            "PCTOOL_NOTICE_FILE": str(self._err / "no-root-watcher.json"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.endpoint(self.names[node]),
        }

    def start(self, *script: str, nodes: list[int] | None = None, **environ: str) -> None:
        """Start the launches, with the stand-in for torchrun."""
        command = [sys.executable, str(HERE / "gang_launch.py"), json.dumps(self.options), str(self.per_node)]
        self.start_command([*command, str(HERE / "gang_scripts" / script[0]), *script[1:]], nodes=nodes, **environ)

    def start_command(self, command: list[str], *, nodes: list[int] | None = None, **environ: str) -> None:
        """Start the launches by any command."""
        for node in nodes if nodes is not None else range(self.nodes):
            with (self._err / f"out-{node}").open("w") as out, (self._err / f"err-{node}").open("w") as err:
                self.processes[node] = subprocess.Popen(
                    command, env={**self.environ(node), **environ}, stdout=out, stderr=err, text=True
                )

    def wait(self, node: int) -> int:
        """Wait for a launch and return its exit code."""
        try:
            return self.processes[node].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def codes(self) -> list[int]:
        """Wait for all launches and return their exit codes."""
        return [self.wait(node) for node in sorted(self.processes)]

    def out(self, node: int) -> str:
        return (self._err / f"out-{node}").read_text()

    def err(self, node: int) -> str:
        return (self._err / f"err-{node}").read_text()

    def story(self) -> str:
        """Return all that was said, for a test that fails."""
        said = [f"--- n{node}\n{self.err(node)}" for node in self.processes]
        return "\n".join([*said, *map(str, Ledger(self.run.ledger).read())])

    def records(self) -> dict[str, NodeExit]:
        return read_node_exits(self.attempt)

    def causes(self) -> list[str]:
        records = self.records()
        return [records[name].cause if name in records else "none" for name in self.names]

    def ledger(self, event: str) -> list[Event]:
        return [entry for entry in Ledger(self.run.ledger).read() if entry.event == event]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.story()}"
            time.sleep(0.01)

    def start_record(self, node: int) -> dict[str, Any]:
        path = self.attempt.node_start(self.names[node])
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        assert isinstance(record, dict)
        return record

    def page(self, node: int) -> Page:
        return Page.open(self.start_record(node)["page"])

    def stepping(self, *nodes: int) -> None:
        """Wait until the ranks of these nodes (default: all) have done some steps."""
        for node in nodes or range(self.nodes):
            self.until(lambda node=node: self.start_record(node).get("torchrun_pid"), f"torchrun on {node}")  # type: ignore[misc]
            page = self.page(node)
            self.until(lambda page=page: page.step >= 3, f"steps on {node}")  # type: ignore[misc]
            page.close()

    def notice(self, node: int, *, seconds: float = 120.0) -> None:
        self.imds.notice(self.names[node], when=datetime.now(timezone.utc) + timedelta(seconds=seconds))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.imds.close()
