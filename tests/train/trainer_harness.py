"""Start the small training script under torchrun, with a page made by hand or none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.page import Page

SCRIPT = Path(__file__).parent / "scripts" / "small.py"
LIMIT_S = 180.0


@dataclass
class Trainer:
    """One run directory, and how to start the next attempt in it."""

    run: RunDir
    pages: list[Page] = field(default_factory=list)
    attempt: int = 0

    def start(self, *flags: str, ranks: int = 2, page: bool = True, script: Path = SCRIPT) -> subprocess.Popen[str]:
        """Start an attempt; with a page as launch would, without as a plain torchrun."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PCTOOL_", "SLURM_"))}
        environ[env.RUN_DIR] = str(self.run.path)
        if page:
            self.attempt = max(self.run.attempt_numbers(), default=-1) + 1
            self.run.attempt(self.attempt).path.mkdir(parents=True)
            self.pages.append(Page.create())
            environ |= {env.ATTEMPT: str(self.attempt), env.PAGE: self.pages[-1].path}
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        argv += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port()), str(script), *flags]
        return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def train(self, *flags: str, ranks: int = 2, page: bool = True, code: int | None = 0) -> str:
        """Run an attempt to its end and return what it printed."""
        return finish(self.start(*flags, ranks=ranks, page=page), code)

    @property
    def page(self) -> Page:
        """Return the newest attempt's page."""
        return self.pages[-1]

    def await_step(self, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until the newest attempt has done `step`."""
        deadline = time.monotonic() + LIMIT_S
        while self.page.step < step:
            assert process.poll() is None, finish(process, None)
            assert time.monotonic() < deadline, "the script makes no progress"
            time.sleep(0.002)  # the page is memory: there is nothing to be woken by

    def stop(self, *, deadline: float = 0.0) -> None:
        """Ask for a stop as launch does once every node's flag is set."""
        self.page.request_stop(reason="notice", deadline=deadline)
        self.page.allow_publish()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the fields of all ledger events of one kind."""
        return [event.fields for event in Ledger(self.run.ledger).read() if event.event == kind]

    def metrics(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return the last line of each step that a rank logged, over all attempts."""
        lines: dict[int, dict[str, Any]] = {}
        for attempt in self.run.attempt_numbers():
            path = self.run.logs(attempt) / f"metrics-rank{rank}.jsonl"
            for text in path.read_text().splitlines() if path.exists() else []:
                line = json.loads(text)
                lines[line["step"]] = line
        return lines


def finish(process: subprocess.Popen[str], code: int | None) -> str:
    """Wait for a process and return what it printed; `code` is what it must exit with (None: anything)."""
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks then; killed, it would leave them, and they the pipe open
        said, _ = process.communicate(timeout=LIMIT_S)
        pytest.fail(f"no end in {LIMIT_S:g} s:\n{said}")
    assert code is None or process.returncode == code, said
    return said


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
