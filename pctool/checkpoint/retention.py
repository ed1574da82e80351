"""How many checkpoints are kept: what the user may say, and which of a lineage that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pctool.errors import UsageError
from pctool.run import env
from pctool.units import parse_duration

MIN_KEPT = 2  # one may turn out to be damaged on the day it is needed


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept. A checkpoint stays if any of the three says so; with neither `keep` nor `keep_for_s`, all stay.

    `keep` newest ones; those younger than `keep_for_s` seconds; and for good the first one in each `keep_every` steps
    (exactly the multiples, where the saves fall on them).
    """

    keep: int | None = None
    keep_for_s: float | None = None
    keep_every: int | None = None

    @property
    def removes(self) -> bool:
        """Return whether anything is ever removed: `keep_every` alone says what stays, and not that the rest goes."""
        return self.keep is not None or self.keep_for_s is not None

    def kept(self, chain: Sequence[tuple[int, float]], now: float) -> set[int]:
        """Return the places in `chain`, (step, time saved) from the newest, that stay: the MIN_KEPT newest always."""
        if not self.removes:
            return set(range(len(chain)))
        newest = set(range(min(len(chain), max(self.keep or 0, MIN_KEPT))))
        young = {place for place, (_, saved) in enumerate(chain) if self.is_young(saved, now)}
        return newest | young | set(self._firsts(chain).values())

    def is_young(self, saved: float, now: float) -> bool:
        """Return whether its age keeps one that was saved at `saved` (seconds since the epoch, 0: not known, kept)."""
        return self.keep_for_s is not None and (saved <= 0 or now - saved < self.keep_for_s)

    def _firsts(self, chain: Sequence[tuple[int, float]]) -> dict[int, int]:
        """Return the place of the lowest step in each `keep_every` steps, from the first multiple on."""
        firsts: dict[int, int] = {}
        for place, (step, _) in enumerate(chain):  # steps descend, so the last one noted is the lowest
            if self.keep_every is not None and step >= self.keep_every:
                firsts[step // self.keep_every] = place
        return firsts

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `committed` event that say what is kept, for the mirror to keep the same."""
        extra = {"keep_for": self.keep_for_s, "keep_every": self.keep_every}
        return {"keep": self.keep, **{name: value for name, value in extra.items() if value is not None}}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Retention:
        """Return what `fields` wrote."""
        keep, keep_for, keep_every = (fields.get(name) for name in ("keep", "keep_for", "keep_every"))
        return cls(
            keep=int(keep) if keep is not None else None,
            keep_for_s=float(keep_for) if keep_for is not None else None,
            keep_every=int(keep_every) if keep_every is not None else None,
        )


def as_retention(keep: int | Retention | None) -> Retention:
    """Return the retention of a bare count; None keeps all."""
    return keep if isinstance(keep, Retention) else Retention(keep=keep)


def retention_from(
    environ: Mapping[str, str],
    *,
    keep: int | None = None,
    keep_for: str | None = None,
    keep_every: int | None = None,
) -> Retention:
    """Return what is kept by PCTOOL_KEEP, PCTOOL_KEEP_FOR and PCTOOL_KEEP_EVERY, each winning over the script's own.

    They come from the job spec. Raises UsageError naming the one that is wrong.
    """
    said_for = environ.get(env.KEEP_FOR)
    return Retention(
        keep=_count(environ, env.KEEP, "keep", keep),
        keep_for_s=parse_keep_for(said_for, name=env.KEEP_FOR)
        if said_for
        else parse_keep_for(keep_for, name="keep_for"),
        keep_every=_count(environ, env.KEEP_EVERY, "keep_every", keep_every),
    )


def parse_keep_for(text: str | None, *, name: str = "checkpoint.keep-for") -> float | None:
    """Return the seconds of an age such as 7d, None for None. Raises UsageError calling it `name`."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error.what}", fix='write an age as in "12h" or "7d"') from None


def _count(environ: Mapping[str, str], variable: str, argument: str, given: int | None) -> int | None:
    said = environ.get(variable)
    if not said:
        if given is not None and given < 1:
            raise UsageError(
                f"{argument}={given} of Run(...) is not positive", fix=f"leave {argument} out to do without"
            )
        return given
    if not (said.isascii() and said.isdigit()) or int(said) < 1:
        raise UsageError(f"{variable}={said!r} is not a whole number of at least 1", where="environment")
    return int(said)
