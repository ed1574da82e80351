"""What a launch checks before it says that its node can start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pctool.errors import IncompleteError, UsageError
from pctool.node.config import LaunchConfig
from pctool.node.trouble import NodeTroubleError, UnseenError
from pctool.run.records import Claim, read_claim

VISIBLE_S = 65.0  # NFS keeps a folder's old listing for up to 60 s (acdirmax)
_POLL_S = 0.5
_IMPORT_S = 120.0  # a cold interpreter on a busy shared file system


def check_run_directory(config: LaunchConfig, *, wait_s: float = VISIBLE_S) -> Claim:
    """Return the claim of this attempt. Raise UnseenError if this node does not see it: the folder is not shared.

    Raises UsageError where another attempt's claim is in its place. Where the run's folder is there and only the
    attempt is missing, a stale listing may be the reason: wait a while.
    """
    claim_path = config.attempt_dir.claim
    deadline = time.monotonic() + wait_s
    while True:
        why = ""
        try:
            claim = read_claim(config.attempt_dir)
        except (OSError, IncompleteError) as error:
            claim, why = None, f" ({error})"
        if claim is not None and claim.nonce == config.nonce:
            return claim
        if claim is not None:
            raise UsageError(
                f"node {config.name} sees another attempt's claim (nonce {claim.nonce})",
                where=str(claim_path),
                fix="give every run a run directory of its own, on the shared file system",
            )
        if time.monotonic() >= deadline or not _says(config.run.path.is_dir):
            raise UnseenError(
                f"node {config.name} cannot see {claim_path}, which node 0 has written{why}",
                where=str(config.run.path),
                fix="put the run directory on a file system that all nodes share, such as /fsx",
            )
        time.sleep(_POLL_S)


def _says(look: Callable[[], bool]) -> bool:
    """Return what Path.is_dir or Path.is_file says; False where it raises, of a mount that is stale or shut."""
    try:
        return look()
    except OSError:
        return False


def check_torch(config: LaunchConfig) -> None:
    """Raise UsageError if the interpreter is missing, or has no torch, or not awscrt for a script of pctool.train.

    They are looked for, not imported: that is slow. Raises NodeTroubleError where the interpreter does not answer.
    """
    wanted = ["torch", "awscrt"] if _names_train(config.script) else ["torch"]
    if config.python == sys.executable:
        missing = next((name for name in wanted if importlib.util.find_spec(name) is None), None)
    else:
        missing = _ask(config.python, config.name, wanted)
    if missing is not None:
        package = "pctool's checkpoint extra (pctool[checkpoint])" if missing == "awscrt" else missing
        raise UsageError(
            f"node {config.name}: the interpreter {config.python} has no {missing}",
            fix=f"install {package} there, or name the interpreter that has it (job spec: python)",
        )


def _names_train(script: Sequence[str]) -> bool:
    """Return whether the script itself speaks of pctool.train; one that leaves it to a module hears it from Run."""
    try:
        return b"pctool.train" in Path(script[0]).read_bytes()
    except OSError:
        return False  # `-m module`


def check_script(config: LaunchConfig) -> None:
    """Raise UsageError if the training script is not on this node."""
    first = config.script[0]
    if not first.startswith("-") and not _says(Path(first).is_file):
        raise UsageError(
            f"node {config.name} cannot see the script {first}",
            where=str(Path.cwd()),
            fix="name it by an absolute path on the shared file system, or set chdir in the job spec",
        )


def _ask(python: str, node: str, wanted: Sequence[str]) -> str | None:
    """Return the first of the modules that an interpreter does not have, None if it has all."""
    code = (
        "import importlib.util, sys; "
        "print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None), 'end')"
    )
    try:
        done = subprocess.run(
            [python, "-c", code, *wanted],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NodeTroubleError(
            f"node {node}: the interpreter {python} has not answered in {_IMPORT_S:g} s",
            fix="see whether the file system that holds it is slow on this node",
        ) from None
    except OSError as error:
        raise UsageError(
            f"node {node}: the interpreter {python} does not run: {error}",
            fix="name one that all nodes have (job spec: python)",
        ) from None
    said = done.stdout.split()
    if said[-1:] != ["end"]:  # it broke before it could tell
        last = done.stderr.strip().rpartition("\n")[2] or "it said nothing"
        raise UsageError(
            f"node {node}: the interpreter {python} does not run: it ended with {done.returncode} ({last[:200]})",
            fix=f"see what `{python} -c 'import torch'` says on that node",
        )
    return next((name for name in wanted if name in said), None)
