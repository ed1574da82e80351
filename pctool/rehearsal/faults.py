"""Faults that are not the cluster's: damaged files, an exception in a rank, a time limit that comes near."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pctool.rehearsal.observe import RehearsalError
from pctool.run.layout import RunDir, parse_checkpoint_name
from pctool.slurm import query
from pctool.slurm.command import run as run_command

# Loaded by the ranks' interpreter through PYTHONPATH: it waits for the trigger, then raises in the main thread. The
# script under rehearsal is not touched.
_SITECUSTOMIZE = """\
import os
import threading


def _arm():
    import ctypes
    import select

    trigger = {trigger!r}
    with open(trigger) as fifo:  # opens when somebody writes
        select.select([fifo], [], [])
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(RuntimeError)
    )


if os.environ.get("RANK") == {rank!r} and "TORCHELASTIC_RUN_ID" in os.environ:
    threading.Thread(target=_arm, daemon=True).start()
"""


def install_error(folder: Path, *, rank: int, before: str | None) -> dict[str, str]:
    """Prepare an exception in one rank and return the environment that loads it; `arm_error` sets it off.

    `before` is the PYTHONPATH that the job has without it.
    """
    trigger = _trigger(folder)
    os.mkfifo(trigger)
    site = folder / "raise"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(trigger=str(trigger), rank=str(rank)))
    return {"PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])])}


def arm_error(folder: Path) -> None:
    """Set the prepared exception off."""
    try:
        fd = os.open(_trigger(folder), os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise RehearsalError(f"no rank waits for the prepared exception: {error}") from error
    try:
        os.write(fd, b"raise\n")
    finally:
        os.close(fd)


def _trigger(folder: Path) -> Path:
    return folder / "raise.trigger"


def newest_checkpoint(run: RunDir) -> Path:
    """Return the folder of the newest complete checkpoint."""
    found = [
        (key, path)
        for path in (run.checkpoints.iterdir() if run.checkpoints.is_dir() else ())
        if (key := parse_checkpoint_name(path.name)) and (path / "MANIFEST").exists()
    ]
    if not found:
        raise RehearsalError("there is no complete checkpoint to damage", where=str(run.checkpoints))
    return max(found)[1]


def newest_data_file(run: RunDir) -> Path:
    """Return the biggest data file of the newest complete checkpoint."""
    files = [path for path in newest_checkpoint(run).iterdir() if path.suffix == ".distcp"]
    return max(files, key=lambda path: path.stat().st_size)


def flip_byte(path: Path) -> None:
    """Flip one bit in the middle of a file, keeping its size."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def lower_time_limit(job_id: str) -> None:
    """Set the job's limit so that it ends within two minutes: Slurm counts limits in whole minutes."""
    info = query.show_job(job_id)
    if info is None or info.start_time is None:
        raise RehearsalError(f"Slurm knows no running job {job_id}")
    minutes = int(time.time() - info.start_time) // 60 + 2
    run_command(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}"])
