"""pctool: multi-node training on AWS ParallelCluster that survives losing its nodes.

`pctool.submit` and `pctool.JobSpec` are imported when first used, so that `import pctool` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pctool.job.submit import submit
    from pctool.spec.job import JobSpec

__all__ = ["JobSpec", "submit"]


def __getattr__(name: str) -> Any:
    if name == "submit":
        from pctool.job.submit import submit

        return submit
    if name == "JobSpec":
        from pctool.spec.job import JobSpec

        return JobSpec
    raise AttributeError(f"module 'pctool' has no attribute {name!r}")
