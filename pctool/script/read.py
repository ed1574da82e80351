"""From the bytes of a script to what sbatch reads in its directives."""

from __future__ import annotations

from pctool.script.getopt import parse
from pctool.script.header import read_header
from pctool.script.reading import Directives, Given, Problem, Version, Word


def read_directives(data: bytes, *, version: Version) -> Directives:
    """Return what sbatch of a version reads in the #SBATCH lines of a script.

    sbatch goes component by component and gives up at the first fault, so that a second one is not told.
    """
    header = read_header(data, version)
    words: list[Word] = []
    given: list[Given] = []
    problems: tuple[Problem, ...] = ()
    for number, component in enumerate(header.components):
        words += component
        if number == len(header.components) - 1 and header.problems:
            break  # the words of this component were never handed to getopt
        parsed = parse(component, version=version, component=number)
        given += parsed.given
        problems = (parsed.problem,) if parsed.problem else _stray(parsed.rest)
        if problems:
            break
    return Directives(
        version=version,
        words=tuple(words),
        given=tuple(given),
        problems=problems or header.problems,
        ignored=header.ignored,
        stops_at=header.stops_at,
    )


def _stray(rest: tuple[Word, ...]) -> tuple[Problem, ...]:
    if not rest:
        return ()
    message = f"error: Invalid directive found in batch script: {rest[0].text}"
    return (Problem(message=message, start=rest[0].start, end=rest[0].end),)
