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

from unbroken.kube.quantity import parse_quantity

from .terminal import Guarded, marked, visible

FIELD = 11
"""Characters of the column of names in a report."""
NARROWEST = 40
"""Lines are wrapped to this many characters at least, however narrow the terminal is."""


@dataclass(frozen=True, slots=True)
class Paper:
    """The medium of a report: a terminal has a width and colours, a file has neither."""

    width: int | None = None
    has_colours: bool = False
    is_guarded: bool = False
    """True if the terminal shows marked colours only (`terminal`)."""

    def paint(self, text: str, style: str) -> str:
        """The text in a colour, bold or dim; unchanged if the medium has no colours."""
        if not self.has_colours or not style:
            return text
        shown = visible(text)
        if style in ("bold", "dim"):
            result = typer.style(shown, bold=style == "bold" or None, dim=style == "dim" or None)
        else:
            result = typer.style(shown, style)
        return marked(result) if self.is_guarded else result

    def wrap(
        self, text: str, indent: int, style: str = "", first: str | None = None
    ) -> Iterator[str]:
        """Wrap a text; the first line begins with `first`, the others with the indent."""
        room = max((self.width or 0) - indent, NARROWEST) if self.width else None
        lines = [text]
        if room is not None and len(text) > room:
            lines = textwrap.wrap(text, room, break_on_hyphens=False, drop_whitespace=True)
        for index, line in enumerate(lines):
            start = " " * indent if index or first is None else first
            yield f"{start}{self.paint(line, style)}".rstrip()

    def field(self, name: str, text: str, style: str = "") -> Iterator[str]:
        """Lines of a named field of a report."""
        first = f"  {self.paint(f'{name:<{FIELD}}', 'dim')}"
        return self.wrap(text, FIELD + 2, style, first)


def paper() -> Paper:
    """The medium of standard output."""
    if not sys.stdout.isatty():
        return Paper()
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    columns = shutil.get_terminal_size().columns
    return Paper(columns, not is_plain, isinstance(sys.stdout, Guarded))


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_value(value: Any, form: str) -> None:
    """Print a value as `json` or `yaml`."""
    if form == "json":
        print_json(value)
        return
    import yaml  # slow to load

    plain = msgspec.to_builtins(value)
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as kubectl does; cells are never cut, because programs may read them."""
    cells = [list(map(str, row)) for row in (titles, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    for row in cells:
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def size_text(quantity: str | None) -> str:
    """A memory size of Kubernetes, such as `24684084Ki`, in GiB with one digit; `-` for None."""
    return "-" if quantity is None else f"{parse_quantity(quantity) / 2**30:.1f} GiB"


def note(text: str) -> None:
    """Print a line to standard error: it is not part of the answer."""
    print(text, file=sys.stderr, flush=True)
