"""The job comment by which verbs find a run from a job id: `pctool:RUN`, and a note for people after a space.

The run directory may hold spaces, so whitespace and `%` in it are written as %XX; everything after the first space is
the note.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX = "pctool:"
_ESCAPE = re.compile(r"[%\s\"'|\\]")


class RunComment(NamedTuple):
    """What a comment of ours says."""

    run_dir: str
    note: str


def format_comment(run_dir: str, note: str = "") -> str:
    """Return the comment of a job of ours, on one line; without a note it holds no space and no quote."""
    escaped = _ESCAPE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), run_dir)
    line = " ".join(note.split())
    return f"{PREFIX}{escaped} {line}".rstrip()


def parse_comment(text: str | None) -> RunComment | None:
    """Return run directory and note, or None for a comment that is not ours."""
    if not text or not text.startswith(PREFIX):
        return None
    escaped, _, note = text[len(PREFIX) :].strip().partition(" ")
    run_dir = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), escaped.encode())
    return RunComment(run_dir.decode(errors="replace"), note.strip())
