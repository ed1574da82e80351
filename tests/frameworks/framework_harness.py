"""A run directory, attempts in it with a page as launch makes one, and what is left of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pctool.run import env
from pctool.run.layout import RunDir
from pctool.run.ledger import Ledger
from pctool.run.page import Page

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 180.0


class Lost(Exception):  # noqa: N818 - no error, a lost node
    """In the place of a node that is lost."""


@dataclass
class Attempts:
    """One run, whose attempts are claimed and get a page as launch makes it."""

    run: RunDir
    page: Page | None = None

    @contextmanager
    def attempt(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
        """Claim the next attempt, for a training in this process."""
        with monkeypatch.context() as patch:
            for name, value in self._environ().items():
                patch.setenv(name, value)
            assert self.page is not None
            yield self.page

    def torchrun(self, script: str, *flags: str) -> str:
        """Run the next attempt on two ranks to its end; it must exit 0. Return what it printed."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PCTOOL_", "SLURM_"))}
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
        argv += ["--master-port", str(free_port()), str(SCRIPTS / script), *flags]
        done = subprocess.run(
            argv,
            env={**environ, **self._environ(), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def lose(self, saved: int) -> None:
        """Lose the node, once the checkpoint of step `saved` is complete."""
        end = time.monotonic() + LIMIT_S
        while saved not in [event["step"] for event in self.events("committed")]:
            assert time.monotonic() < end, "no checkpoint is completed"
            time.sleep(0.005)  # another process writes it
        raise Lost

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the fields of all ledger events of one kind."""
        return [event.fields for event in Ledger(self.run.ledger).read() if event.event == kind]

    def _environ(self) -> dict[str, str]:
        number = max(self.run.attempt_numbers(), default=-1) + 1
        self.run.attempt(number).path.mkdir(parents=True)
        self.page = Page.create()
        return {env.RUN_DIR: str(self.run.path), env.ATTEMPT: str(number), env.PAGE: self.page.path}


def ask_to_stop(page: Page) -> None:
    """Ask for a stop as launch does once every node's flag is set."""
    page.request_stop(reason="notice", deadline=0.0)
    page.allow_publish()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
