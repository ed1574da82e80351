"""Where everything of one run lives on the shared file system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ATTEMPT = re.compile(r"^\d{6}$")
_CHECKPOINT = re.compile(r"^(\d{6})-(\d{8,})$")


def attempt_name(attempt: int) -> str:
    """Return the folder name of an attempt: 3 -> '000003'."""
    return f"{attempt:06d}"


def checkpoint_name(attempt: int, step: int) -> str:
    """Return the folder name of a checkpoint: (3, 1200) -> '000003-00001200'."""
    return f"{attempt:06d}-{step:08d}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return (attempt, step) of a checkpoint folder's name, or None if it is not one."""
    match = _CHECKPOINT.match(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class AttemptDir:
    """One attempt's folder, `RUN/attempts/000003`."""

    path: Path
    number: int

    @property
    def claim(self) -> Path:
        """Return the path of claim.json: job id, restart count, nonce."""
        return self.path / "claim.json"

    @property
    def stop(self) -> Path:
        """Return the path of the stop request."""
        return self.path / "stop"

    @property
    def heartbeat(self) -> Path:
        """Return the path of the file launch 0 rewrites every few seconds: step, time."""
        return self.path / "heartbeat.json"

    @property
    def nodes(self) -> Path:
        """Return the folder of the nodes' records."""
        return self.path / "nodes"

    def node_exit(self, node: str) -> Path:
        """Return the path of the record of how the launch on `node` ended."""
        return self.nodes / f"{node}.exit"

    def node_start(self, node: str) -> Path:
        """Return the path of the record a launch writes when it starts: pid, flag page, host."""
        return self.nodes / f"{node}.json"


@dataclass(frozen=True)
class RunDir:
    """One run's folder."""

    path: Path

    @property
    def job_toml(self) -> Path:
        """Return the path of the resolved job spec."""
        return self.path / "job.toml"

    @property
    def ledger(self) -> Path:
        """Return the path of the ledger."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        """Return the folder of the attempts."""
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        """Return the folder of attempt `number`, whether it exists or not."""
        return AttemptDir(self.attempts / attempt_name(number), number)

    def logs(self, attempt: int) -> Path:
        """Return the folder of an attempt's logs."""
        return self.path / "logs" / attempt_name(attempt)

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts that were claimed, ascending; [] before the first.

        Raises OSError where the folder exists but cannot be listed: that is never "none".
        """
        try:
            names: Iterable[str] = os.listdir(self.attempts)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if _ATTEMPT.match(name))


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old bytes or the new, never half: temp, fsync, rename, fsync of folder."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, path)
    except BaseException as error:
        temp.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write or an fsync does not know it
        raise
    fsync_dir(path.parent)


def fsync_dir(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
