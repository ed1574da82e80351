"""sbatch's options by version: long name, letter, kind of argument, since when and until when.

Source: what sbatch 22.05.8, 24.11.5 and 26.05.5 answer to an ambiguous prefix (all names, in getopt's own order, which
its messages follow) and to an option with and without a value, recorded 2026-12-06; the versions between by the
releases' notes and sources. `export-file` is missing from the table of 23.11 and taken to work there, since it does
before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Version = tuple[int, int]
Argument = Literal["none", "required", "optional"]

NONE: Argument = "none"
REQUIRED: Argument = "required"
OPTIONAL: Argument = "optional"

OLDEST: Version = (22, 5)
NEWEST: Version = (26, 5)


@dataclass(frozen=True)
class Option:
    """One option. `letter` is empty where it has none; `until` is the last version that has it."""

    name: str
    letter: str
    argument: Argument
    since: Version = OLDEST
    until: Version = (99, 11)


# In the order of sbatch's own table. The kind of argument is that of the newest version.
_OPTIONS: tuple[Option, ...] = (
    Option("account", "A", REQUIRED),
    Option("acctg-freq", "", REQUIRED),
    Option("array", "a", REQUIRED),
    Option("autocomplete", "", REQUIRED, since=(23, 2)),
    Option("batch", "", REQUIRED),
    Option("begin", "b", REQUIRED),
    Option("bb", "", REQUIRED),
    Option("bbf", "", REQUIRED),
    Option("cluster-constraint", "", REQUIRED),
    Option("chdir", "D", REQUIRED),
    Option("cluster", "", REQUIRED),
    Option("clusters", "M", REQUIRED),
    Option("comment", "", REQUIRED),
    Option("consolidate-segments", "", NONE, since=(25, 11)),
    Option("container", "", REQUIRED),
    Option("container-id", "", REQUIRED, since=(23, 2)),
    Option("container-type", "", REQUIRED, since=(26, 5)),
    Option("context", "", REQUIRED),
    Option("contiguous", "", NONE),
    Option("constraint", "C", REQUIRED),
    Option("core-spec", "S", REQUIRED),
    Option("cores-per-socket", "", REQUIRED),
    Option("cpu-freq", "", REQUIRED),
    Option("cpus-per-gpu", "", REQUIRED),
    Option("cpus-per-task", "c", REQUIRED),
    Option("deadline", "", REQUIRED),
    Option("delay-boot", "", REQUIRED),
    Option("dependency", "d", REQUIRED),
    Option("distribution", "m", REQUIRED),
    Option("error", "e", REQUIRED),
    Option("exclude", "x", REQUIRED),
    Option("exclusive", "", OPTIONAL),
    Option("export", "", REQUIRED),
    Option("export-file", "", REQUIRED),
    Option("external", "", NONE, since=(25, 5)),
    Option("extra", "", REQUIRED, since=(23, 2)),
    Option("extra-node-info", "B", REQUIRED),
    Option("get-user-env", "", NONE),
    Option("gid", "", REQUIRED),
    Option("gpu-bind", "", REQUIRED),
    Option("gpu-freq", "", REQUIRED),
    Option("gpus", "G", REQUIRED),
    Option("gpus-per-node", "", REQUIRED),
    Option("gpus-per-socket", "", REQUIRED),
    Option("gpus-per-task", "", REQUIRED),
    Option("gres", "", REQUIRED),
    Option("gres-flags", "", REQUIRED),
    Option("help", "h", NONE),
    Option("hint", "", REQUIRED),
    Option("hold", "H", NONE),
    Option("ignore-pbs", "", NONE),
    Option("input", "i", REQUIRED),
    Option("job-name", "J", REQUIRED),
    Option("kill-on-invalid-dep", "", REQUIRED),
    Option("licenses", "L", REQUIRED),
    Option("mail-type", "", REQUIRED),
    Option("mail-user", "", REQUIRED),
    Option("mcs-label", "", REQUIRED),
    Option("mem", "", REQUIRED),
    Option("mem-bind", "", REQUIRED),
    Option("mem-per-cpu", "", REQUIRED),
    Option("mem-per-gpu", "", REQUIRED),
    Option("mem-update", "", REQUIRED, since=(26, 5)),
    Option("mincpus", "", REQUIRED),
    Option("network", "", REQUIRED),
    Option("nice", "", OPTIONAL),
    Option("no-kill", "k", OPTIONAL),
    Option("no-requeue", "", NONE),
    Option("nodefile", "F", REQUIRED),
    Option("nodelist", "w", REQUIRED),
    Option("nodes", "N", REQUIRED),
    Option("ntasks", "n", REQUIRED),
    Option("ntasks-per-core", "", REQUIRED),
    Option("ntasks-per-gpu", "", REQUIRED),
    Option("ntasks-per-node", "", REQUIRED),
    Option("ntasks-per-socket", "", REQUIRED),
    Option("ntasks-per-tres", "", REQUIRED),
    Option("oom-kill-step", "", OPTIONAL, since=(24, 11)),
    Option("open-mode", "", REQUIRED),
    Option("output", "o", REQUIRED),
    Option("overcommit", "O", NONE),
    Option("oversubscribe", "s", NONE),
    Option("parsable", "", NONE),
    Option("partition", "p", REQUIRED),
    Option("power", "", REQUIRED, until=(23, 11)),
    Option("prefer", "", REQUIRED),
    Option("priority", "", REQUIRED),
    Option("profile", "", REQUIRED),
    Option("propagate", "", OPTIONAL),
    Option("qos", "q", REQUIRED),
    Option("quiet", "Q", NONE),
    Option("reboot", "", NONE),
    Option("requeue", "", OPTIONAL),
    Option("resources", "", REQUIRED, since=(25, 11)),
    Option("reservation", "", REQUIRED),
    Option("resv-ports", "", OPTIONAL, since=(24, 5)),
    Option("segment", "", REQUIRED, since=(24, 5)),
    Option("signal", "", REQUIRED),
    Option("sockets-per-node", "", REQUIRED),
    Option("spread-job", "", NONE),
    Option("spread-segments", "", NONE, since=(25, 11)),
    Option("stepmgr", "", NONE, since=(24, 5)),
    Option("switches", "", REQUIRED),
    Option("tasks-per-node", "", REQUIRED),
    Option("test-only", "", NONE),
    Option("thread-spec", "", REQUIRED),
    Option("threads-per-core", "", REQUIRED),
    Option("time", "t", REQUIRED),
    Option("time-min", "", REQUIRED),
    Option("tmp", "", REQUIRED),
    Option("tres-bind", "", REQUIRED, since=(23, 11)),
    Option("tres-per-task", "", REQUIRED, since=(23, 2)),
    Option("uid", "", REQUIRED),
    Option("use-min-nodes", "", NONE),
    Option("verbose", "v", NONE),
    Option("version", "V", NONE),
    Option("usage", "", NONE),
    Option("wait", "W", NONE),
    Option("wait-all-nodes", "", REQUIRED),
    Option("wckey", "", REQUIRED),
    Option("wrap", "", REQUIRED),
)

# Options whose argument was of another kind up to and with a version.
_BEFORE: Mapping[str, tuple[Version, Argument]] = {
    "requeue": ((25, 5), NONE),  # --requeue=expedite came with 25.11
    "get-user-env": ((24, 11), OPTIONAL),  # optional in 22.05 and 24.11, none in 26.05; 25.05 and 25.11 not asked
}


@cache
def options(version: Version) -> tuple[Option, ...]:
    """Return the options that sbatch of this version has, in the order in which its messages name them."""
    return tuple(_as_of(option, version) for option in _OPTIONS if option.since <= version <= option.until)


def _as_of(option: Option, version: Version) -> Option:
    last, argument = _BEFORE.get(option.name, ((0, 0), option.argument))
    return replace(option, argument=argument) if version <= last else option


@cache
def by_name(version: Version) -> Mapping[str, Option]:
    """Return the options of a version by their long names."""
    return {option.name: option for option in options(version)}


@cache
def by_letter(version: Version) -> Mapping[str, Option]:
    """Return the options of a version by their letters."""
    return {option.letter: option for option in options(version) if option.letter}
