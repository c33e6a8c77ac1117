"""Scripts in text files: read, played line by line, and written again with what happened.

A file begins with its theme. `== TITLE` begins a case, and `#` a comment. A line `given -> shown`
says all that comes of what is given; one without an arrow does not care. An indented line goes on
with the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

MARK = "== "
INDENT = "    "
"""A line that begins so goes on with the one before."""
WIDTH = 100
"""Characters of a line."""


@dataclass(frozen=True)
class Case:
    """One script of a file."""

    path: Path
    title: str
    lines: tuple[str, ...]
    """Its lines as they are in the file, below the title."""


def read_cases(path: Path) -> list[Case]:
    """Return the scripts of a file."""
    _, *texts = f"\n{path.read_text()}".split(f"\n{MARK}")
    cases = [Case(path, *_head(text)) for text in texts]
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles), f"{path}: a title is there twice"
    return cases


def _head(text: str) -> tuple[str, tuple[str, ...]]:
    title, *lines = text.rstrip("\n").split("\n")
    return title, tuple(lines)


def play(case: Case, say: Callable[[str], str]) -> tuple[str, ...]:
    """Give a script line by line; return its lines as they are if what is shown is true.

    `say` takes what stands before the arrow, and returns what comes of it.
    """
    found: list[str] = []
    lines = list(case.lines)
    while lines:
        whole = [lines.pop(0)]
        if not whole[0].strip() or whole[0].startswith("#"):
            found += whole
            continue
        while lines and lines[0].startswith(INDENT):
            whole.append(lines.pop(0))
        given, arrow, expected = " ".join(map(str.strip, whole)).partition("->")
        shown = say(given.strip())
        is_true = not arrow or shown == expected.strip()
        found += whole if is_true else wrapped(f"{given.strip()} -> {shown}".rstrip())
    return tuple(found)


def wrapped(line: str) -> list[str]:
    """Return the lines of a file for a line of a script."""
    return wrap(
        line, WIDTH, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


def rewrite(case: Case, lines: tuple[str, ...]) -> None:
    """Write other lines of a script into its file."""
    before, after = ("\n".join([f"{MARK}{case.title}", *old]) for old in (case.lines, lines))
    text = case.path.read_text()
    assert text.count(before) == 1, f"{case.path}: {case.title}"
    case.path.write_text(text.replace(before, after))
