"""What sbatch reads in a script, as values: every word with its span, the options, errors, ignored lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int]  # Slurm's, as in (24, 5)
Origin = Literal["script", "command line"]
IgnoredKind = Literal["after-command", "look-alike", "disabled", "foreign"]


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of the directives as getopt sees it, and the bytes it was read from, quotes included."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Given:
    """One option as it was given. Spans are 0, 0 where it does not stand in the script."""

    name: str  # the long name, whatever was written: nodes for -N and for --node
    value: str | None
    spelled: str  # as written, without its value: -N, --part
    origin: Origin
    component: int  # 0 but for heterogeneous jobs
    start: int
    end: int  # of the option with its value


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A line that looks like a directive, and that sbatch does not obey as one of its own."""

    line: int
    start: int
    end: int
    text: str
    kind: IgnoredKind


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why sbatch refuses: its own words, and the bytes they are about (0, 0: the script as a whole)."""

    message: str
    start: int = 0
    end: int = 0


@dataclass(frozen=True, kw_only=True)
class Directives:
    """What one version of sbatch reads in the header of one script.

    `problems` are those of the script's form, of words and of options. Values are not judged here, nor are the lines
    of other schedulers that sbatch reads too (#PBS, #BSUB).
    """

    version: Version
    words: tuple[Word, ...]  # in the order in which sbatch meets them, up to where it gives up
    given: tuple[Given, ...]
    problems: tuple[Problem, ...]
    ignored: tuple[Ignored, ...]
    stops_at: int  # offset of the first line at which sbatch reads no further; the size where there is none

    def value(self, name: str) -> str | None:
        """Return the value that an option was given last in the first component; None where it has none."""
        values = [one.value for one in self.given if one.name == name and one.component == 0]
        return values[-1] if values else None
