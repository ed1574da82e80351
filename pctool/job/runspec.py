"""The job spec that submit left in the run directory."""

from __future__ import annotations

from typing import Any

from pctool.errors import UsageError
from pctool.job.load import parse_job
from pctool.run.layout import RunDir


def spec_fields(run: RunDir) -> dict[str, Any]:
    """Return the fields written in RUN/job.toml, {} where there is none. Raise UsageError for one of another shape."""
    try:
        text = run.job_toml.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"not text: {error}", where=str(run.job_toml), fix="submit the job again") from error
    return parse_job(text, where=str(run.job_toml))


def store_of(run: RunDir) -> str | None:
    """Return where the run's checkpoints are mirrored, None if nowhere."""
    store = spec_fields(run).get("checkpoint_store")
    return str(store) if store else None
