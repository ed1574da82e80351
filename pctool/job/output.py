"""The output of a batch script that was submitted as it stands: one file, as Slurm names it."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from pctool.errors import NotFoundError
from pctool.job.array import NO_TASK
from pctool.job.find import Found, submissions
from pctool.job.logs import ASK_SLURM_S, POLL_S

_CHUNK = 1 << 20
_PATTERN = re.compile(r"%\d*[aAbJjNnrSstuUx]")


def output_of(found: Found) -> Path | None:
    """Return the job's output file; None for a run that pctool has launched, whose ranks have logs of their own.

    Raises NotFoundError where Slurm did not tell the name, or where it holds a part that only a task of an array fills.
    """
    submitted = submissions(found.run)
    if found.run.attempt_numbers() or not submitted or "script" not in submitted[-1].fields:
        return None
    name = (found.job.std_out if found.job else None) or submitted[-1].fields.get("output")
    if not name:
        raise NotFoundError(
            "Slurm did not say where the job's output goes",
            where=str(found.run.ledger),
            fix="without --output it is slurm-JOBID.out in the folder of the submission",
        )
    name = str(name).replace(NO_TASK, "%a")
    if _PATTERN.search(name):
        raise NotFoundError(
            f"the job is an array, and {name} is a file for each task",
            fix=f"name one task, as in `pctool logs {found.job_id}_0`, or read its file",
        )
    return Path(name)


def read_output(path: Path, *, last: int | None = None) -> Iterator[bytes]:
    """Yield the file, or its last lines. Raises NotFoundError before the job has made it."""
    try:
        with path.open("rb") as stream:
            if last is not None:
                yield from deque(stream, maxlen=last)
                return
            while piece := stream.read(_CHUNK):
                yield piece
    except FileNotFoundError:
        raise NotFoundError(
            "the job has not written its output yet", where=str(path), fix="see `pctool status`; with -f this waits"
        ) from None


def follow_output(path: Path, *, alive: Callable[[], bool], last: int | None = None) -> Iterator[bytes]:
    """Yield what is there and then what comes, over requeues, until the job is over for good.

    A requeue without --open-mode=append truncates the file: it is then read anew from its beginning.
    """
    position = 0
    if last is not None and path.exists():
        with path.open("rb") as stream:
            yield from deque(stream, maxlen=last)
            position = stream.tell()
    asked, over = time.monotonic(), not alive()
    while True:
        position, piece = _new(path, position)
        if piece:
            yield piece
            continue
        if over:
            return
        if time.monotonic() - asked >= ASK_SLURM_S:
            over, asked = not alive(), time.monotonic()
            continue  # once more, for what was written before it ended
        time.sleep(POLL_S)


def _new(path: Path, position: int) -> tuple[int, bytes]:
    """Return the new position and what stands between it and the old one."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(position if size >= position else 0)
            piece = stream.read(_CHUNK)
            return stream.tell(), piece
    except FileNotFoundError:
        return position, b""
