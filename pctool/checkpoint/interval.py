"""How often to save: what the user may say, and the interval that loses least.

The interval that loses least is Young's (J. W. Young, A first order approximation to the optimum checkpoint interval,
CACM 17(9), 1974), to first order in stall / up-time; J. T. Daly (A higher order estimate of the optimum checkpoint
interval for restart dumps, FGCS 22(3), 2006) adds the terms that matter once a save takes a good part of the up-time.
Where a share of the losses is told in time for a last save, only the others cost the work since the last checkpoint,
which is the factor 1 / (1 - r) of G. Aupy, Y. Robert and F. Vivien's studies of checkpointing with predicted faults.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pctool.errors import UsageError
from pctool.run import env
from pctool.units import parse_duration

AUTO = "auto"
_HOW = 'write a number of steps as in 100, a time as in "10min", or "auto"'
# Half of this, lost once in an up-time of 1.7 h, is under 0.1 %: nothing is left to win, while each save still makes
# files on the shared file system for every rank, and lines in the ledger.
MIN_AUTO_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often to save: after so many steps, after so many seconds of training, or as `auto` finds best.

    Exactly one is set. `str()` gives the text that `parse_every` reads back.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False

    def __str__(self) -> str:
        """Return the text for PCTOOL_EVERY and for messages."""
        if self.auto:
            return AUTO
        return str(self.steps) if self.steps is not None else f"{self.seconds:.6f}".rstrip("0").rstrip(".") + "s"


def parse_every(value: int | str | None, *, name: str = "checkpoint.every") -> Every | None:
    """Return what a number of steps, a duration or "auto" says; None for None. Raises UsageError calling it `name`."""
    if value is None:
        return None
    text = str(value).strip()
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit():
        if int(text) < 1:
            raise UsageError(f"{name} is {text}", fix="use at least 1")
        return Every(steps=int(text))
    if text.lower() == AUTO:
        return Every(auto=True)
    try:
        return Every(seconds=parse_duration(text))
    except UsageError as error:
        near = difflib.get_close_matches(text.lower(), [AUTO])
        raise UsageError(f"{name}: {error.what}", fix=f'did you mean "{AUTO}"?' if near else _HOW) from None


def every_from(environ: Mapping[str, str], given: int | str | None) -> Every | None:
    """Return how often to save by PCTOOL_EVERY, which comes from the job spec and wins, or by the script's `given`.

    Raises UsageError naming the one that is wrong.
    """
    said = environ.get(env.EVERY)
    return parse_every(said, name=env.EVERY) if said else parse_every(given, name="every of Run(...)")


def best_interval(
    *, stall_s: float, uptime_s: float, noticed: float = 0.0, persist_s: float = 0.0, least_s: float = 0.0
) -> float:
    """Return the seconds of training between two saves that lose least: sqrt(2 * stall * up-time / (1 - noticed)).

    `stall_s` is how long a save holds up the training, `uptime_s` the gang's mean up-time, `noticed` the share of
    losses that leave time for a last save (below 1). Never shorter than `persist_s`, the time until a checkpoint is
    durable, since saves would pile up. Sources: this module's docstring.
    """
    return max(math.sqrt(2 * stall_s * uptime_s / (1 - noticed)), persist_s, least_s)


def waste(
    interval_s: float,
    *,
    stall_s: float,
    uptime_s: float,
    restart_s: float,
    noticed: float = 0.0,
    lag_s: float = 0.0,
    lost_when_noticed_s: float = 0.0,
) -> float:
    """Return the share of wall time that brings the training nothing, from 0 to 1.

    Of the time that the gang is up the stalls go off, and for each loss half an interval and the `lag_s` from a stall's
    end until its checkpoint is durable (or `lost_when_noticed_s` for the share `noticed`); after each up-time a restart
    follows. A first-order model: against a simulation it is right within half a point up to an interval of a twelfth of
    the up-time.
    """
    lost_s = (1 - noticed) * (interval_s / 2 + lag_s) + noticed * lost_when_noticed_s
    useful = 1 - stall_s / (interval_s + stall_s) - lost_s / uptime_s
    return 1 - useful * uptime_s / (uptime_s + restart_s)
