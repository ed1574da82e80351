"""Begin a run from another run's checkpoint: a branch that leaves the other as it is."""

from __future__ import annotations

from pathlib import Path

from pctool.checkpoint.lineage import find_resume
from pctool.checkpoint.manifest import Manifest, is_complete
from pctool.checkpoint.refs import refer
from pctool.errors import IncompleteError, NotFoundError
from pctool.run.layout import RunDir, parse_checkpoint_name


def branch_point(source: str, run: RunDir) -> tuple[Path, Manifest]:
    """Return the checkpoint that `run` is to begin from, and have it kept for as long as `run` is there.

    `source` is a run directory (its newest one is taken) or a checkpoint's folder in one. Raises NotFoundError,
    IncompleteError for one that is not complete, OSError.
    """
    path = Path(source).absolute()
    if parse_checkpoint_name(path.name) is None:
        other = RunDir(path)
        point = find_resume(other, None)
        if point is None:
            raise NotFoundError(
                "there is no complete checkpoint to start from",
                where=source,
                fix="give start_from a run directory, or a checkpoint's folder in it (`pctool ckpt ls`)",
            )
        path = other.checkpoints / point.name
    elif not path.is_dir():
        raise NotFoundError("there is no such checkpoint to start from", where=source, fix="see `pctool ckpt ls RUN`")
    refer(RunDir(path.parents[1]), path.name, run)
    verdict = is_complete(path)
    if not verdict.ok or verdict.manifest is None:
        raise IncompleteError(
            f"the checkpoint to start from is not complete: {verdict.why}", where=str(path), fix="choose another one"
        )
    return path, verdict.manifest
