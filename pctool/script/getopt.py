"""Words to options, as glibc's getopt_long does it for sbatch: prefixes, clustered letters, its own messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pctool.errors import UsageError
from pctool.facts.sbatch_options import NONE, OPTIONAL, REQUIRED, Option, by_letter, by_name, options
from pctool.script.reading import Given, Origin, Problem, Version, Word


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The options in a list of words, the words behind them, and what getopt says where it gives up."""

    given: tuple[Given, ...]
    rest: tuple[Word, ...]  # from the first word that is neither an option nor its value
    problem: Problem | None = None


class _UsageError(Exception):
    def __init__(self, message: str, word: Word) -> None:
        super().__init__(message)
        self.problem = Problem(message=message, start=word.start, end=word.end)


@dataclass(frozen=True, kw_only=True)
class _Table:
    names: Mapping[str, Option]
    letters: Mapping[str, Option]
    order: tuple[Option, ...]


def parse(
    words: Sequence[Word],
    *,
    version: Version,
    origin: Origin = "script",
    component: int = 0,
    extra: Sequence[Option] = (),
) -> Parsed:
    """Read the options at the beginning of `words`, and stop at the first word that is none, or behind `--`.

    `extra` are long options that sbatch does not have; they are known by their whole name alone.
    """
    table = _Table(
        names={**by_name(version), **{option.name: option for option in extra}},
        letters=by_letter(version),
        order=options(version),
    )
    given: list[Given] = []
    rest = list(words)
    try:
        while rest and rest[0].text.startswith("-") and rest[0].text != "-":
            word = rest.pop(0)
            if word.text == "--":
                break
            read = _long if word.text.startswith("--") else _short
            given += (_give(found, origin, component) for found in read(word, rest, table))
    except _UsageError as error:
        return Parsed(given=tuple(given), rest=(), problem=error.problem)
    return Parsed(given=tuple(given), rest=tuple(rest))


@dataclass(frozen=True, kw_only=True)
class _Found:
    option: Option
    spelled: str
    value: str | None
    word: Word
    value_word: Word | None  # the word after it, where the value stands there


def _give(found: _Found, origin: Origin, component: int) -> Given:
    return Given(
        name=found.option.name,
        value=found.value,
        spelled=found.spelled,
        origin=origin,
        component=component,
        start=found.word.start,
        end=(found.value_word or found.word).end,
    )


def _long(word: Word, rest: list[Word], table: _Table) -> Iterator[_Found]:
    spelled, equals, value = word.text.partition("=")
    option = table.names.get(spelled[2:]) or _by_prefix(spelled[2:], word, table)
    if option.argument == NONE and equals:
        raise _UsageError(f"option '--{option.name}' doesn't allow an argument", word)
    if option.argument == REQUIRED and not equals:
        if not rest:
            raise _UsageError(f"option '--{option.name}' requires an argument", word)
        following = rest.pop(0)
        yield _Found(option=option, spelled=spelled, value=following.text, word=word, value_word=following)
        return
    yield _Found(option=option, spelled=spelled, value=value if equals else None, word=word, value_word=None)


def _by_prefix(prefix: str, word: Word, table: _Table) -> Option:
    candidates = [option for option in table.order if option.name.startswith(prefix)]
    if not candidates:
        raise _UsageError(f"unrecognized option '{word.text}'", word)
    if len(candidates) > 1:
        names = " ".join(f"'--{option.name}'" for option in candidates)
        raise _UsageError(f"option '{word.text}' is ambiguous; possibilities: {names}", word)
    return candidates[0]


def _short(word: Word, rest: list[Word], table: _Table) -> Iterator[_Found]:
    """Yield the options of one word of letters; the first that takes a value takes what follows it in the word."""
    letters = word.text[1:].encode("utf-8", "surrogateescape")  # getopt goes byte by byte
    for at in range(len(letters)):
        letter, behind = (part.decode("utf-8", "surrogateescape") for part in (letters[at : at + 1], letters[at + 1 :]))
        option = table.letters.get(letter)
        if option is None:
            raise _UsageError(f"invalid option -- '{letter}'", word)
        if option.argument == NONE:
            yield _Found(option=option, spelled=f"-{letter}", value=None, word=word, value_word=None)
            continue
        if option.argument == OPTIONAL or behind:
            value = behind or None
            yield _Found(option=option, spelled=f"-{letter}", value=value, word=word, value_word=None)
            return
        if not rest:
            raise _UsageError(f"option requires an argument -- '{letter}'", word)
        following = rest.pop(0)
        yield _Found(option=option, spelled=f"-{letter}", value=following.text, word=word, value_word=following)
        return


@dataclass(frozen=True, kw_only=True)
class Command:
    """The words of `sbatch [OPTIONS] script [ARGUMENTS]`, and the options of ours among them."""

    options: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    given: tuple[Given, ...]  # sbatch's own
    extra: Mapping[str, str | None]


def split_command(words: Sequence[str], *, version: Version, extra: Sequence[Option]) -> Command | None:
    """Split a command line as sbatch would; None where it has no script. Long options of `extra` are taken out.

    Raises UsageError in getopt's words for an option that neither has.
    """
    marked = [Word(text=text, start=at, end=at + 1) for at, text in enumerate(words)]
    parsed = parse(marked, version=version, origin="command line", extra=extra)
    if parsed.problem:
        raise UsageError(parsed.problem.message, fix="see --help, and `man sbatch` for sbatch's own options")
    if not parsed.rest:
        return None
    ours = {option.name for option in extra}
    taken = [one for one in parsed.given if one.name in ours]
    dropped = {at for one in taken for at in range(one.start, one.end)}
    script = parsed.rest[0].start
    return Command(
        options=tuple(text for at, text in enumerate(words[:script]) if at not in dropped),
        script=words[script],
        arguments=tuple(words[script + 1 :]),
        given=tuple(one for one in parsed.given if one.name not in ours),
        extra={one.name: one.value for one in taken},
    )
