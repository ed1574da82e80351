"""The help: grouped by task, an example a verb, and clear words for a wrong verb or flag."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pctool.cli.main import CHECK, FOLLOW, INSIDE, SUBMIT, VERBS, parser


def pctool(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pctool", *argv], capture_output=True, text=True, timeout=60)


def test_top_level_help_lists_each_verb_once_under_its_task() -> None:
    done = pctool("--help")
    assert (done.returncode, done.stderr) == (0, "")
    sections = re.split(r"^(\S.*):$", done.stdout, flags=re.MULTILINE)[1:]
    listed = {
        title: re.findall(r"^  (\w+) ", body, re.MULTILINE)
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }
    assert list(listed) == [SUBMIT, FOLLOW, CHECK, INSIDE]
    assert listed == {task: [name for name, verb in VERBS.items() if verb.task == task] for task in listed}
    assert sum(map(len, listed.values())) == len(VERBS)


@pytest.mark.parametrize("flag", ["-h", "help"])
def test_short_ways_to_the_same_help(flag: str) -> None:
    assert pctool(flag).stdout == pctool("--help").stdout


def test_no_verb_shows_the_help_and_is_a_usage_error() -> None:
    done = pctool()
    assert done.returncode == 2
    assert "usage: pctool VERB" in done.stdout


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_an_example(name: str) -> None:
    done = pctool(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: pctool {name}")
    example = done.stdout.split("\nexample:\n", 1)[1]
    assert f"pctool {name}" in example


@pytest.mark.parametrize("name", VERBS)
def test_every_argument_of_a_verb_says_what_it_is(name: str) -> None:
    for made in parsers(parser(name)):
        for action in made._actions:
            bare = not isinstance(action, argparse._SubParsersAction) and not action.help
            assert not bare, f"{action.option_strings or action.dest} of `{made.prog}` has no help"


def parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Return a verb's parser and those of its actions."""
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from parsers(sub)


@pytest.mark.parametrize("name", VERBS)
def test_an_unknown_flag_is_a_usage_error(name: str) -> None:
    done = pctool(name, "--no-such-flag")
    assert (done.returncode, done.stdout) == (2, "")
    takes_command = name in {"submit", "render"}  # where it may have been meant for the script
    assert ("unknown flag --no-such-flag" if takes_command else f"usage: pctool {name}") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_verb_is_answered_with_the_right_one() -> None:
    done = pctool("sumbit")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no verb 'sumbit'" in done.stderr
    assert "did you mean `pctool submit`?" in done.stderr


def test_a_verb_like_no_other_is_sent_to_the_help() -> None:
    done = pctool("xyzzy")
    assert done.returncode == 2
    assert "`pctool --help` lists the verbs" in done.stderr


def test_help_takes_a_verb() -> None:
    assert pctool("help", "submit").stdout == pctool("submit", "--help").stdout
    assert pctool("help").stdout == pctool("--help").stdout


def test_a_package_that_is_not_installed_is_named() -> None:
    program = "import sys; sys.modules['yaml'] = None; from pctool.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", program, "local", "up", "--cluster", __file__]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"the Python package 'yaml' is not installed in {sys.prefix}" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    done = pctool("--version")
    assert (done.returncode, done.stdout) == (0, f"pctool {version('pctool')}\n")


@pytest.mark.parametrize("argv", [("--help",), ("render", "--help")])
def test_a_reader_that_goes_away_is_no_error(argv: tuple[str, ...]) -> None:
    program = [sys.executable, "-m", "pctool", *argv]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(program, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered)
    assert (done.returncode, done.stderr) == (0, "")
