"""Which lines of a script sbatch reads as directives, and the words in them.

Written from what the real sbatch answers (22.05.8, 24.11.5, 26.05.5). The rules: a directive begins with `#SBATCH` at
the line's first byte, no blank is needed behind it; reading stops at the first line whose first non-blank byte is not
`#`. Words are split at blanks; `'` and `"` group, also within a word; a backslash makes the next byte literal, within
quotes too; a `#` that is neither quoted nor escaped ends the line, also within a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pctool.script.reading import Ignored, IgnoredKind, Problem, Version, Word

MAGIC = (b"#SBATCH", b"#SLURM")  # the second works, with a complaint
_BLANKS = b" \t\n\v\f\r"
_HET = re.compile(rb"(?:het|pack)job(?![^ \t\v\f\r])", re.IGNORECASE)
_ESCAPED_BLANK = (24, 5)  # the first version in which `\ ` does not split
_NOT_A_SCRIPT: tuple[str, ...] = (
    "error: This does not look like a batch script.  The first",
    "error: line must start with #! followed by the path to an interpreter.",
    "error: For instance: #!/bin/sh",
)
_NUL: tuple[str, ...] = (
    "error: The Slurm controller does not allow scripts that",
    "error: contain a NULL character '\\0'.",
)
_DOS: tuple[str, ...] = (
    "error: Batch script contains DOS line breaks (\\r\\n)",
    "error: instead of expected UNIX line breaks (\\n).",
)

_FOREIGN = re.compile(rb"#(?:PBS|BSUB|\$ ?-|COBALT|PJM|YBATCH|OAR|MSUB)\b|#\$ ?-")
_DISABLED = re.compile(rb"[ \t]*#[# \t]*#[ \t]*SBATCH\b")
_NEAR = re.compile(rb"[ \t]*#[ \t]*([A-Za-z]{5,7})[ \t]+--?[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Header:
    """The directives of a script: the words of each component, or why sbatch does not come that far."""

    components: tuple[tuple[Word, ...], ...]
    problems: tuple[Problem, ...]
    ignored: tuple[Ignored, ...]
    stops_at: int


def read_header(data: bytes, version: Version) -> Header:
    """Return what sbatch of a version reads in the header of a script."""
    stops_at, lines = _lines(data)
    problems = tuple(_refusal(data))
    components: list[list[Word]] = [[]]
    if not problems:
        try:
            for start, end in lines:
                _read_line(data, start, end, version, components)
        except _FatalError as fatal:
            problems = (fatal.problem,)
    return Header(
        components=tuple(tuple(words) for words in components),
        problems=problems,
        ignored=tuple(_ignored(data, stops_at)),
        stops_at=stops_at,
    )


def _refusal(data: bytes) -> Iterator[Problem]:
    """Yield sbatch's words where it does not take the bytes for a script at all; the first reason wins."""
    text = data.partition(b"\0")[0]
    lines: tuple[str, ...] = ()
    if not data:
        lines = ("error: Batch script is empty!",)
    elif not text.strip(_BLANKS):
        lines = ("error: Batch script contains only whitespace!",)
    elif not data.startswith(b"#!"):
        lines = _NOT_A_SCRIPT
    elif b"\0" in data:
        lines = _NUL
    elif b"\r\n" in data:
        lines = _DOS
    at = data.find({_NUL: b"\0", _DOS: b"\r\n"}.get(lines, b""))
    for line in lines:
        yield Problem(message=line, start=at, end=at)


def _lines(data: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Return where reading stops, and the spans of the directives before that, the magic word left out."""
    found, start = [], 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        line = data[start:end]
        magic = next((word for word in MAGIC if line.startswith(word)), None)
        if magic:
            found.append((start + len(magic), end))
        elif not line.lstrip(_BLANKS).startswith(b"#") and line.strip(_BLANKS):
            return start, found
        start = end + 1
    return len(data), found


class _FatalError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _read_line(data: bytes, start: int, end: int, version: Version, components: list[list[Word]]) -> None:
    """Append the words of one directive; a line that begins with `hetjob` begins a component instead."""
    at = _skip_blanks(data, start, end)
    if _HET.match(data, at, end):
        components.append([])
        return
    while True:
        word, at = _next_word(data, at, end, version)
        if word is None:
            return
        components[-1].append(word)


def _skip_blanks(data: bytes, at: int, end: int) -> int:
    while at < end and data[at] in _BLANKS:
        at += 1
    return at


def _next_word(data: bytes, begin: int, end: int, version: Version) -> tuple[Word | None, int]:
    """Return the next word and where it ends; None at the end of the line, and where an empty word ends it."""
    at = start = _skip_blanks(data, begin, end)
    if at < end and data[at] == ord(":"):
        raise _fatal(data, begin, start, end, "Unexpected `:`")
    if _HET.match(data, at, end):
        return None, end
    text, quote, escaped = bytearray(), 0, False
    while at < end:
        byte = data[at]
        if escaped and (byte not in _BLANKS or quote or version >= _ESCAPED_BLANK):
            text.append(byte)
            escaped = False
        elif byte == ord("\\"):
            escaped = True
        elif byte == quote:
            quote = 0
        elif quote:
            text.append(byte)
        elif byte in b"\"'":
            quote = byte
        elif byte in _BLANKS:
            break
        elif byte == ord("#"):
            end = at
            break
        else:
            text.append(byte)
        at += 1
    if quote:
        raise _fatal(data, begin, start, end, f"Unmatched `{chr(quote)}`")
    if not text:
        return None, end
    return Word(text=text.decode("utf-8", "surrogateescape"), start=start, end=at), at


def _fatal(data: bytes, begin: int, start: int, end: int, what: str) -> _FatalError:
    number = data.count(b"\n", 0, begin) + 1
    rest = data[begin:end].decode("utf-8", "surrogateescape")
    return _FatalError(Problem(message=f"fatal: line {number}: {what} in [{rest}]", start=start, end=end))


def _ignored(data: bytes, stops_at: int) -> Iterator[Ignored]:
    """Yield the lines that look like directives and that sbatch does not obey."""
    start = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        kind = _kind(line, after=start >= stops_at)
        if kind:
            text = line.decode("utf-8", "surrogateescape")
            yield Ignored(line=number, start=start, end=start + len(line), text=text, kind=kind)
        start += len(line) + 1


def _kind(line: bytes, *, after: bool) -> IgnoredKind | None:
    if line.startswith(b"#SBATCH"):
        return "after-command" if after else None
    if _FOREIGN.match(line):
        return "foreign"
    if _DISABLED.match(line):
        return "disabled"
    near = _NEAR.match(line)
    return "look-alike" if near and not after and _is_near(near[1].upper()) else None  # after it: a comment


def _is_near(word: bytes) -> bool:
    """Return whether the word is SBATCH with one letter changed, left out or added, or two neighbours exchanged."""
    wanted = b"SBATCH"
    if word == wanted:
        return True
    if len(word) == len(wanted):
        odd = [at for at in range(len(word)) if word[at] != wanted[at]]
        swapped = len(odd) == 2 and odd[1] == odd[0] + 1 and word[odd[0]] == wanted[odd[1]]
        return len(odd) == 1 or (swapped and word[odd[1]] == wanted[odd[0]])
    short, long = sorted((word, wanted), key=len)
    return len(long) - len(short) == 1 and any(long[:at] + long[at + 1 :] == short for at in range(len(long)))
