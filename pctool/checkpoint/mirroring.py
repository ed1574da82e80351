"""The mirror of a run that was not started by `pctool launch`: a child of rank 0, fed by lines on its stdin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from pctool.run.layout import RunDir


class MirrorChild:
    """Copy committed checkpoints to the store. A process that died is started anew at the next one.

    One that cannot be started is said (`say`), and is nobody's error: what it leaves the next attempt mirrors.
    """

    def __init__(self, run: RunDir, store: str, attempt: int, *, say: Callable[[str], None]) -> None:
        self._argv = [sys.executable, "-m", "pctool.checkpoint.mirror", str(run.path), store, "--attempt", str(attempt)]
        self._log = run.logs(attempt) / "mirror.log"
        self._say = say
        self._missed = False
        self._process: subprocess.Popen[bytes] | None = None

    def committed(self) -> None:
        """Say that a checkpoint was committed."""
        try:
            self._tell("mirror")
        except OSError as error:
            self._missed = True
            self._say(f"the mirror to S3 cannot be started: {error}; it is tried again at the next checkpoint")

    def finish(self) -> bool:
        """Have the rest mirrored, and return whether all is on S3: for good, or after three tries."""
        if self._process is None:
            return not self._missed
        self._tell("finish 0")
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code == 0

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died just now: the next line starts it anew
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
