"""The plan: everything a submission will do, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pctool.spec.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `submit` executes and `--dry-run` prints.

    `script` is the whole text of the batch script, `argv` the sbatch command (the script's path is filled in when it
    is written), `directories` are made before submission, `files` (path -> text) written before it.
    """

    spec: JobSpec
    script: str
    argv: tuple[str, ...]
    directories: tuple[str, ...]
    files: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The submission of a batch script as it stands.

    `argv` is the whole sbatch command. The job's records go into `run_dirs` (one a task for an array of pctool's own);
    where that is empty, into the new folder `folder`/`name`-JOBID.
    """

    script: str
    text: bytes
    name: str
    argv: tuple[str, ...]
    folder: str
    run_dirs: tuple[str, ...] = ()
    remember: str = ""  # the run directory as the list of jobs has it, with %a for the task; empty: the new folder
    warnings: tuple[str, ...] = ()
