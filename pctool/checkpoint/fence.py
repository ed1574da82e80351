"""The fence: once a newer attempt exists, an older one publishes, prunes and mirrors nothing."""

from __future__ import annotations

from pctool.errors import FencedError
from pctool.run.layout import RunDir


def check_fence(run: RunDir, attempt: int) -> None:
    """Raise FencedError if an attempt newer than `attempt` has been claimed; OSError if that cannot be read."""
    newest = max(run.attempt_numbers(), default=attempt)
    if newest > attempt:
        raise FencedError(
            f"attempt {newest} has taken over this run, so attempt {attempt} may write nothing more",
            where=str(run.path),
            fix=f"end attempt {attempt}: nothing it does from now on is used",
        )
