"""What a launch checks before it says that its node can start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from pctool.errors import IncompleteError, UsageError
from pctool.node.config import LaunchConfig
from pctool.run.records import Claim, read_claim

VISIBLE_S = 65.0  # NFS keeps a folder's old listing for up to 60 s (acdirmax)
_POLL_S = 0.5
_IMPORT_S = 120.0  # a cold interpreter on a busy shared file system


def check_run_directory(config: LaunchConfig, *, wait_s: float = VISIBLE_S) -> Claim:
    """Return the claim of this attempt. Raise UsageError if this node does not see it: the folder is not shared.

    Where the run's folder is there and only the attempt is missing, a stale listing may be the reason: wait a while.
    """
    claim_path = config.attempt_dir.claim
    deadline = time.monotonic() + wait_s
    while True:
        try:
            claim = read_claim(config.attempt_dir)
        except (OSError, IncompleteError):
            claim = None
        if claim is not None and claim.nonce == config.nonce:
            return claim
        if claim is not None:
            raise UsageError(
                f"node {config.name} sees another attempt's claim (nonce {claim.nonce})",
                where=str(claim_path),
                fix="give every run a run directory of its own, on the shared file system",
            )
        if time.monotonic() >= deadline or not config.run.path.is_dir():
            raise UsageError(
                f"node {config.name} cannot see {claim_path}, which node 0 has written",
                where=str(config.run.path),
                fix="put the run directory on a file system that all nodes share, such as /fsx",
            )
        time.sleep(_POLL_S)


def check_torch(config: LaunchConfig) -> None:
    """Raise UsageError if the interpreter is missing or has no torch; it is looked for, not imported: that is slow."""
    if config.python == sys.executable:
        found = importlib.util.find_spec("torch") is not None
    else:
        found = _ask(config.python, config.name)
    if not found:
        raise UsageError(
            f"node {config.name}: the interpreter {config.python} has no torch",
            fix="install torch there, or name the interpreter that has it (job spec: python)",
        )


def check_script(config: LaunchConfig) -> None:
    """Raise UsageError if the training script is not on this node."""
    first = config.script[0]
    if not first.startswith("-") and not Path(first).is_file():
        raise UsageError(
            f"node {config.name} cannot see the script {first}",
            where=str(Path.cwd()),
            fix="name it by an absolute path on the shared file system, or set chdir in the job spec",
        )


def _ask(python: str, node: str) -> bool:
    code = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('torch') is None else 0)"
    try:
        done = subprocess.run(
            [python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"node {node}: the interpreter {python} does not run: {error}",
            fix="name one that all nodes have (job spec: python)",
        ) from None
    return done.returncode == 0
