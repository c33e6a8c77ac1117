"""Printing: tables, JSON, lines for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """A value as indented JSON on standard output."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as kubectl prints them, never cut: what is printed may be read by a program."""
    cells = [list(map(str, row)) for row in (titles, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    for row in cells:
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def note(text: str) -> None:
    """Say something that is not the answer: on standard error."""
    print(text, file=sys.stderr, flush=True)
