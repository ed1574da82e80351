"""The mark of what is under way to S3, so that the ranks do not remove it from under the mirror.

A file in the run directory, since the ranks and the mirror are processes of their own. It holds for the attempt that
set it only, so that one that was left behind keeps nothing for longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pctool.run.layout import RunDir, write_atomic


@contextmanager
def under_way(run: RunDir, attempt: int, name: str) -> Iterator[None]:
    """Mark a checkpoint as under way as long as this lasts.

    Where the mark cannot be written (a full disk) the copy goes on without: S3 may be all there is.
    """
    with suppress(OSError):
        write_atomic(_path(run), f"{attempt} {name}\n".encode())
    try:
        yield
    finally:
        with suppress(OSError):
            _path(run).unlink(missing_ok=True)


def marked(run: RunDir, attempt: int) -> str | None:
    """Return the name of the checkpoint that this attempt's mirror is copying, None if it copies none."""
    try:
        words = _path(run).read_text().split()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return words[1] if len(words) == 2 and words[0] == str(attempt) else None


def _path(run: RunDir) -> Path:
    return run.checkpoints / ".mirroring"
