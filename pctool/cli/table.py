"""Print a table: with rich on a terminal, as aligned plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, styles: Sequence[str] = ()) -> None:
    """Print rows of text on stdout; `styles` are rich styles, one a row."""
    if sys.stdout.isatty():
        _print_rich(headers, rows, styles)
        return
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=SIMPLE_HEAD)
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style=styles[number] if styles else None)
    Console().print(table)
