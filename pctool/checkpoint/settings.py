"""What a run is told by its script and by the environment, resolved once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pctool.checkpoint.interval import Every, every_from
from pctool.checkpoint.retention import Retention, retention_from
from pctool.errors import UsageError
from pctool.run import env
from pctool.run.layout import RunDir


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one rank. Without pctool's batch script `attempt`, `page` and `store` are None."""

    run: RunDir
    attempt: int | None
    every: Every | None
    retention: Retention
    store: str | None
    page: str | None
    writer: str | None
    local_rank: int
    world_size: int  # as the launcher says
    local_world_size: int
    master: tuple[str, int] | None
    code: str
    config: str


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a script asks for; what the job spec says wins."""

    run_dir: str | None = None
    every: int | str | None = None
    keep: int | None = None
    keep_for: str | None = None
    keep_every: int | None = None
    store: str | None = None


def resolve(environ: Mapping[str, str], wishes: Wishes) -> Settings:
    """Resolve a script's wishes and the environment; the environment, which comes from the job spec, wins.

    Raises UsageError for what is no number, time or address.
    """
    run = RunDir(Path(environ.get(env.RUN_DIR) or wishes.run_dir or "run").absolute())
    host, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT", None)
    return Settings(
        run=run,
        attempt=_number(environ, env.ATTEMPT, None, least=0),
        every=every_from(environ, wishes.every),
        retention=retention_from(environ, keep=wishes.keep, keep_for=wishes.keep_for, keep_every=wishes.keep_every),
        store=environ.get(env.STORE) or wishes.store or None,
        page=environ.get(env.PAGE) or None,
        writer=environ.get(env.WRITER) or None,
        local_rank=_number(environ, "LOCAL_RANK", 0, least=0) or 0,
        world_size=_number(environ, "WORLD_SIZE", 1) or 1,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1) or 1,
        master=(host, port) if host and port else None,
        code=_digest(Path(sys.argv[0])) if sys.argv and sys.argv[0] else "",
        config=_digest(run.job_toml) or hashlib.sha256("\0".join(sys.argv[1:]).encode()).hexdigest(),
    )


def from_environment(wishes: Wishes) -> Settings:
    """Resolve a script's wishes with this process's environment."""
    return resolve(os.environ, wishes)


def _number(environ: Mapping[str, str], name: str, default: int | None, *, least: int = 1) -> int | None:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdigit() or int(text) < least:
        raise UsageError(f"{name}={text!r} is not a whole number of at least {least}", where="environment")
    return int(text)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, empty if it is not there."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
