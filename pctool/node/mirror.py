"""The mirror's process, as node 0's launch sees it: fed by lines on stdin, started anew should it die."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pctool.node.config import LaunchConfig

_NOT_STARTED = 126  # as shells have it


class Mirror:
    """Copy committed checkpoints to the store. Use from one thread; `on_end` is called in another."""

    def __init__(self, config: LaunchConfig, *, on_end: Callable[[int], None]) -> None:
        assert config.store is not None
        module, run = config.mirror_module, str(config.run.path)
        self._argv = [sys.executable, "-m", module, run, config.store, "--attempt", str(config.attempt)]
        self._environ: Mapping[str, str] = config.environ
        self._log: Path = config.run.logs(config.attempt) / "mirror.log"
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def started(self) -> bool:
        """Return whether it was ever started: an attempt that steps back mirrors nothing."""
        return self._process is not None

    def start(self) -> None:
        """Start the process: what an earlier attempt left is mirrored first. One that runs is left alone."""
        if self._process is not None and self._process.poll() is None:
            return
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=dict(self._environ),
                    start_new_session=True,
                )
        except OSError:
            self._on_end(_NOT_STARTED)
            return
        threading.Thread(target=self._wait, args=(self._process,), name="mirror", daemon=True).start()

    def committed(self) -> None:
        """Say that a checkpoint was committed."""
        self._tell("mirror")

    def finish(self, deadline: float) -> None:
        """Ask for the rest to be mirrored by `deadline` (seconds since the epoch, 0: none); `on_end` follows."""
        self._tell(f"finish {deadline:.3f}" if deadline else "finish 0")

    def stop(self) -> None:
        """End the process if it still runs."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()

    def _tell(self, line: str) -> None:
        self.start()
        if self._process is None or self._process.stdin is None:
            return  # it could not be started, and that has been told
        with suppress(BrokenPipeError):  # it died just now: its end is reported, and the next line starts it anew
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if process is self._process:
            self._on_end(code)
