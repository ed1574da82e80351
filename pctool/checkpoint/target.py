"""What a user names where checkpoints are meant: a run, one checkpoint of it, or the address of a run on S3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pctool.checkpoint.stores import PosixStore, Store, order, store_key, unreadable
from pctool.errors import NotFoundError, UsageError
from pctool.run.layout import RunDir, parse_checkpoint_name
from pctool.run.ledger import Event, Ledger

_TASK = re.compile(r"task-\d+")  # the last part of an array task's key, as `store_key` makes it
_FOLDER = "checkpoints"
S3_SCHEME = "s3://"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where checkpoints lie, the nearest tier first, and which one is meant (None: no certain one).

    `run` is None for what has no run directory here: an address on S3, or a checkpoint's folder that lies alone.
    """

    stores: tuple[Store, ...]
    run: RunDir | None = None
    name: str | None = None
    store: str | None = None  # s3://bucket/prefix of the S3 tier

    @property
    def where(self) -> str:
        """Return the addresses of all tiers, for messages."""
        return " and ".join(store.where for store in self.stores)

    def store_of(self, tier: str) -> Store | None:
        """Return one tier, None if the target has none such."""
        return next((store for store in self.stores if store.tier == tier), None)

    def events(self) -> list[Event]:
        """Return the run's ledger; [] where there is no run directory. Raise StoreUnreadableError."""
        if self.run is None:
            return []
        try:
            return Ledger(self.run.ledger).read()
        except OSError as error:
            raise unreadable(self.run.ledger, error) from error

    def names(self) -> dict[str, list[str]]:
        """Return the checkpoints of each tier, oldest first. Raise StoreUnreadableError or AwsError."""
        return {store.tier: store.names() for store in self.stores}


def run_of(text: str) -> RunDir | None:
    """Return the run directory that a path names, itself or by a checkpoint in it; None for anything else."""
    if text.startswith(S3_SCHEME):
        return None
    path = Path(text).absolute()
    if not parse_checkpoint_name(path.name):
        return RunDir(path)
    return RunDir(path.parent.parent) if path.parent.name == _FOLDER else None


def resolve(text: str, *, store: str | None, at: str | None = None) -> Target:
    """Return what `text` names; `store` is the run's S3 tier, if it has one.

    Raises UsageError for what cannot be one, NotFoundError where no run and no checkpoint is.
    """
    check_name(at)
    if text.startswith(S3_SCHEME):
        return _on_s3(text, at)
    path = Path(text).absolute()
    named = path.name if parse_checkpoint_name(path.name) else None
    run = run_of(text)
    if run is None:
        return Target(stores=(PosixStore(path.parent),), name=_one_name(text, named, at))
    if store is None and not _is_run(run):
        raise NotFoundError("no run directory here", where=str(run.path), fix="give a run directory, or its S3 address")
    return Target(
        stores=(PosixStore(run.checkpoints), *([_s3(store, store_key(run))] if store else [])),
        run=run,
        name=_one_name(text, named, at),
        store=store,
    )


def split_address(text: str) -> tuple[str, str, str | None]:
    """Return (store, key, name or None) of s3://bucket/prefix/RUN[/checkpoints[/NAME]]. Raise UsageError."""
    parts = [part for part in text.removeprefix(S3_SCHEME).split("/") if part]
    name = parts.pop() if len(parts) > 1 and parse_checkpoint_name(parts[-1]) and parts[-2] == _FOLDER else None
    if parts and parts[-1] == _FOLDER:
        parts.pop()
    length = 2 if len(parts) > 2 and _TASK.fullmatch(parts[-1]) else 1
    if len(parts) <= length:
        raise UsageError(f"{text!r} names no run", fix="write it as s3://bucket/prefix/NAME-OF-THE-RUN-DIRECTORY")
    return S3_SCHEME + "/".join(parts[:-length]), "/".join(parts[-length:]), name


def check_name(name: str | None) -> None:
    """Raise UsageError for what is no checkpoint's name."""
    if name is not None and not parse_checkpoint_name(name):
        raise UsageError(
            f"{name!r} is not a checkpoint's name", fix="write it as `pctool ckpt ls` does: 000003-00001200"
        )


def pick(target: Target, listed: dict[str, list[str]]) -> list[str]:
    """Return the names that are meant, newest first: the one that was named, or all.

    Raises NotFoundError where there is none.
    """
    names = sorted({name for of_tier in listed.values() for name in of_tier}, key=order, reverse=True)
    if target.name is None and names:
        return names
    if target.name in names:
        return [target.name]
    raise nothing_there(target, names)


def nothing_there(target: Target, names: Sequence[str] = ()) -> NotFoundError:
    """Return the error for a checkpoint that is on no tier."""
    there = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    what = f"no checkpoint {target.name}" if target.name else "no checkpoints"
    return NotFoundError(
        f"{what} here", where=target.where, fix=f"there are {there}" if names else "check the path or the address"
    )


def _on_s3(text: str, at: str | None) -> Target:
    store, key, named = split_address(text)
    return Target(stores=(_s3(store, key),), name=_one_name(text, named, at), store=store)


def _s3(store: str, key: str) -> Store:
    from pctool.checkpoint.s3store import S3Store

    return S3Store(store, key)


def _one_name(text: str, named: str | None, at: str | None) -> str | None:
    if named and at and named != at:
        raise UsageError(f"{text} is one checkpoint, --at {at} another", fix="leave --at out, or give the run")
    return at or named


def _is_run(run: RunDir) -> bool:
    try:
        return any(path.exists() for path in (run.checkpoints, run.ledger, run.attempts, run.job_toml))
    except OSError as error:
        raise unreadable(run.path, error) from error
