"""The bytes of one script, and where in them a place is."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property


class Source:
    """A script as bytes. Spans are byte offsets, since bytes are what sbatch reads and what an edit must keep."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data

    @cached_property
    def line_starts(self) -> list[int]:
        """Return the offset of each line's first byte."""
        starts, at = [0], self.data.find(b"\n")
        while at >= 0:
            starts.append(at + 1)
            at = self.data.find(b"\n", at + 1)
        return starts

    def place(self, offset: int) -> tuple[int, int]:
        """Return (line, column) of a byte, both from 1; the column counts characters."""
        line = bisect_right(self.line_starts, offset) - 1
        return line + 1, len(self.text(self.line_starts[line], offset)) + 1

    def text(self, start: int = 0, end: int | None = None) -> str:
        """Return bytes as text; what is not UTF-8 becomes surrogate escapes, so that encoding gives it back."""
        return self.data[start:end].decode("utf-8", "surrogateescape")

    def line_span(self, number: int) -> tuple[int, int]:
        """Return (start, end) of a line counted from 1, its line feed left out."""
        start = self.line_starts[number - 1]
        after = self.line_starts[number] - 1 if number < len(self.line_starts) else len(self.data)
        return start, after
