"""Printing: tables, JSON, lines for people."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import typer

FIELD = 11
"""Width of the column of names in a story."""
NARROWEST = 40
"""Lines are not wrapped for terminals that leave no room for words."""


@dataclass(frozen=True, slots=True)
class Paper:
    """What a story is written on: a terminal has a width and colours, a file has neither."""

    width: int | None = None
    has_colours: bool = False

    def paint(self, text: str, colour: str = "", *, is_bold: bool = False) -> str:
        """The text in a colour, where there are any."""
        if not self.has_colours or not (colour or is_bold):
            return text
        is_dim = colour == "dim"
        shade = None if is_dim or not colour else colour
        return typer.style(text, shade, bold=is_bold or None, dim=is_dim or None)

    def wrap(self, text: str, indent: int, colour: str = "", first: str = "") -> Iterator[str]:
        """Lines no wider than the paper, those after the first with an indent."""
        room = max((self.width or 0) - indent, NARROWEST) if self.width else None
        lines = [text]
        if room is not None and len(text) > room:
            lines = textwrap.wrap(text, room, break_on_hyphens=False, drop_whitespace=True)
        for index, line in enumerate(lines):
            start = " " * indent if index or not first else first
            yield f"{start}{self.paint(line, colour)}".rstrip()

    def field(self, name: str, text: str, colour: str = "") -> Iterator[str]:
        """A named part of a story."""
        first = f"  {self.paint(f'{name:<{FIELD}}', 'dim')}"
        return self.wrap(text, FIELD + 2, colour, first)


def paper() -> Paper:
    """What standard output is."""
    if not sys.stdout.isatty():
        return Paper()
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Paper(shutil.get_terminal_size().columns, not is_plain)


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
