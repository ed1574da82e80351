"""What sbatch reads in a script's directives: each case was answered so by the real one, 22.05.8 or 24.11.5."""

from __future__ import annotations

import pytest

from pctool.errors import UsageError
from pctool.facts.sbatch_options import NONE, REQUIRED, Option, by_name
from pctool.script.getopt import split_command
from pctool.script.read import read_directives
from pctool.script.reading import Version

OLD, NEW = (22, 5), (24, 11)


def words(header: str, version: Version = OLD) -> list[str]:
    return [word.text for word in read_directives(f"#!/bin/bash\n{header}\n".encode(), version=version).words]


def problems(script: str, version: Version = OLD) -> list[str]:
    return [problem.message for problem in read_directives(script.encode(), version=version).problems]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --nodes=2#two", ["--nodes=2"]),
        ("#SBATCH --nodes=2 # don't", ["--nodes=2"]),
        ("#SBATCH--nodes=2", ["--nodes=2"]),
        ('#SBATCH --job-name="run#7"', ["--job-name=run#7"]),
        ("#SBATCH --job-name=run\\#7", ["--job-name=run#7"]),
        ("#SBATCH --job-name=a\\nb", ["--job-name=anb"]),
        ('#SBATCH -J "my job"x -N 2', ["-J", "my jobx", "-N", "2"]),
        ('#SBATCH -J "" -N2', ["-J"]),
        (" #SBATCH -N2", []),
        ("##SBATCH -N2", []),
        ("# note\n\n\t# x\n#SBATCH -N2", ["-N2"]),
        ("set -e\n#SBATCH -N2", []),
        ("#SLURM -N2", ["-N2"]),
    ],
)
def test_words(line: str, expected: list[str]) -> None:
    assert words(line) == expected


def test_an_escaped_blank_splits_before_24_05() -> None:
    line = "#SBATCH -J my\\ job"
    assert words(line, OLD) == ["-J", "my", "job"]
    assert words(line, NEW) == ["-J", "my job"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("", ["error: Batch script is empty!"]),
        ("#!/bin/sh\n#SBATCH --node=2\n", ["'--nodefile' '--nodelist' '--nodes'"]),
        ("#!/bin/sh\n#SBATCH --norequeue\n", ["unrecognized option '--norequeue'"]),
        ("#!/bin/sh\n#SBATCH -J my job\n", ["Invalid directive found in batch script: job"]),
        ("#!/bin/sh\n#SBATCH --comment=don't\n", ["fatal: line 2: Unmatched `'` in [--comment=don't]"]),
        ("#!/bin/sh\n#SBATCH : -N2\n", ["Unexpected `:`"]),
        ("#!/bin/sh\n#SBATCH -J\n", ["option requires an argument -- 'J'"]),
        ("#!/bin/sh\n#SBATCH --hold=1\n", ["option '--hold' doesn't allow an argument"]),
        ("#!/bin/sh\r\n", ["DOS line breaks", "instead of"]),
        ("#SBATCH -N2\n", ["does not look like a batch script", "line must start with #!", "For instance"]),
    ],
)
def test_refusals(script: str, expected: list[str]) -> None:
    said = problems(script)
    assert len(said) == len(expected)
    assert all(part in message for part, message in zip(expected, said, strict=True))


def test_a_value_is_eaten_from_the_next_line_and_the_last_one_wins() -> None:
    read = read_directives(b"#!/bin/sh\n#SBATCH --job-name\n#SBATCH --nodes=2\n#SBATCH -N1 -N3\n", version=OLD)
    assert read.value("job-name") == "--nodes=2"
    assert read.value("nodes") == "3"
    assert read.value("time") is None


def test_spans_cover_the_bytes_of_an_option_with_its_value() -> None:
    script = b'#!/bin/sh\n#SBATCH -J "a b"  --nodes=2 # c\n'
    spans = [script[one.start : one.end] for one in read_directives(script, version=OLD).given]
    assert spans == [b'-J "a b"', b"--nodes=2"]


def test_components_of_a_heterogeneous_job() -> None:
    read = read_directives(b"#!/bin/sh\n#SBATCH -N1\n#SBATCH hetjob # next\n#SBATCH -N2\n", version=OLD)
    assert [(one.name, one.value, one.component) for one in read.given] == [("nodes", "1", 0), ("nodes", "2", 1)]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("# SBATCH -N2", "look-alike"), ("#SBTACH -N2", "look-alike"), ("#sbatch --x", "look-alike"),
        ("##SBATCH -N2", "disabled"), ("#PBS -l x", "foreign"), ("#$ -N x", "foreign"), ("# match -x", None),
        ("# batch: - x", None),
    ],
)  # fmt: skip
def test_lines_that_look_like_directives(line: str, kind: str | None) -> None:
    read = read_directives(f"#!/bin/sh\n{line}\necho\n".encode(), version=OLD)
    assert [one.kind for one in read.ignored] == ([kind] if kind else [])
    assert all((one.line, one.text) == (2, line) for one in read.ignored)


def test_a_directive_behind_the_first_command_is_told() -> None:
    script = b"#!/bin/sh\nset -e\n#SBATCH -N2\n"
    read = read_directives(script, version=OLD)
    assert [(one.line, one.kind) for one in read.ignored] == [(3, "after-command")]
    assert script[read.stops_at :].startswith(b"set -e")


def test_options_come_and_go_with_versions() -> None:
    assert "power" in by_name((23, 11))
    assert "power" not in by_name((24, 5))
    assert by_name((25, 5))["requeue"].argument == NONE
    assert by_name((25, 11))["requeue"].argument == "optional"
    assert "segment" not in by_name((23, 11))


def test_a_command_line_is_split_as_sbatch_splits_it() -> None:
    extra = [Option("run-dir", "", REQUIRED), Option("force", "", NONE)]
    words = ["-N", "2", "--run-dir", "/fsx/x", "--mem=1G", "--force", "job.sh", "--run-dir", "y"]
    command = split_command(words, version=OLD, extra=extra)
    assert command is not None
    assert (command.options, command.script) == (("-N", "2", "--mem=1G"), "job.sh")
    assert command.arguments == ("--run-dir", "y")
    assert command.extra == {"run-dir": "/fsx/x", "force": None}
    assert split_command(["-N", "2"], version=OLD, extra=extra) is None
    with pytest.raises(UsageError, match="unrecognized option '--nope'"):
        split_command(["--nope", "job.sh"], version=OLD, extra=extra)
