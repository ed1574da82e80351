"""The one place that calls sbatch, and reads what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pctool.errors import SlurmError
from pctool.slurm.command import NoAnswerError, run

SBATCH_TIMEOUT_S = 120.0  # a busy slurmctld answers late; sbatch itself tries again for a minute

# What sbatch itself needs to find the cluster; every other SLURM_* describes the job we may be called from.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")


class UnclearSubmissionError(SlurmError):
    """Whether Slurm has the job is not known, so nothing that it would need may be removed."""


def call_sbatch(argv: Sequence[str], *, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """Run an sbatch command that holds --parsable; return the job's id, and the lines that sbatch said besides.

    Raises SlurmError if the job is refused, UnclearSubmissionError where Slurm may have it all the same.
    """
    try:
        done = run(argv, timeout=SBATCH_TIMEOUT_S, env=env, check=False)
    except NoAnswerError as error:
        raise _unclear(error.what) from None
    if done.code != 0 and "timed out" in done.stderr:
        raise _unclear(_said(done.stderr))  # slurmctld may have taken the job, and its answer came too late
    if done.code != 0:
        raise SlurmError(f"sbatch refused the job: {_said(done.stderr) or f'exit code {done.code}'}")
    return job_id_of(done.stdout), _said(done.stderr).splitlines()


def job_id_of(printed: str) -> str:
    """Read the id that `sbatch --parsable` prints: 123, or 123;cluster."""
    lines = printed.strip().splitlines() or [""]
    job_id = lines[-1].partition(";")[0]
    if not job_id.isdigit():
        raise _unclear(f"sbatch printed no job id, but {printed.strip()!r}")
    return job_id


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what describes a job we may be called from: the new job would inherit it."""
    foreign = ("SLURM_", "SRUN_", "SLURMD_", "PCTOOL_")
    return {name: v for name, v in environ.items() if name in _CLUSTER_VARIABLES or not name.startswith(foreign)}


def _unclear(what: str) -> UnclearSubmissionError:
    fix = "see `squeue --me`: if the job is there it runs as it should; if not, submit it again"
    return UnclearSubmissionError(f"{what}; the job may have been submitted", fix=fix)


def _said(stderr: str) -> str:
    lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.splitlines() if line.strip())
    return "\n".join(lines)
