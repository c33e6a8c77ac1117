"""Protection of the user's terminal against control characters in texts from outside.

While a command runs, standard output and standard error go through `Guarded` where they are
terminals.  It shows control characters as text (`\\x1b`), whatever printed them.  Colours of our
own carry a mark that is random for each process, so that no text from outside can contain it.
Files and pipes get every byte unchanged.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_MARK = f"\x1b{os.urandom(16).hex()}["
_COLOUR = re.compile("\x1b\\[([0-9;:]{0,40}m)")
_HEX = [*range(0x09), 0x0B, 0x0C, *range(0x0D, 0x20), *range(0x7F, 0xA0)]
"""C0 controls except tab and newline, DEL, and C1 controls."""
_LONG = [
    *(0x61C, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
    *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000),
]  # fmt: skip
"""Bidirectional controls, line separators and lone surrogates."""
_SHOWN = {item: f"\\x{item:02x}" for item in _HEX} | {item: f"\\u{item:04x}" for item in _LONG}
_SHOWN |= {one: f"\\U{one:08x}" for one in range(0xE0000, 0xE0080)}
_MARK_SHOWN = _MARK.translate(_SHOWN)


def visible(text: str) -> str:
    """The text with its control characters as visible escapes."""
    return text.translate(_SHOWN)


def coloured(text: str) -> str:
    """The text as `visible` has it, with its colours (SGR) kept and reset at its end."""
    parts = _COLOUR.split(text)
    if len(parts) == 1:
        return visible(text)
    return "".join(
        f"\x1b[{part}" if number % 2 else visible(part) for number, part in enumerate(parts)
    ) + ("\x1b[0m")


def marked(text: str) -> str:
    """The text with its escapes marked as our own, so that they reach the terminal."""
    return text.replace("\x1b[", _MARK)


class Guarded:
    """A stream to a terminal that shows control characters as text."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text as `visible` has it; marked colours become real."""
        self.stream.write(visible(text).replace(_MARK_SHOWN, "\x1b["))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # All other attributes are those of the terminal's stream.
        return getattr(self.stream, name)


def raw(stream: Any) -> TextIO:
    """The unguarded stream, for a caller that calls `visible` itself."""
    result: TextIO = stream.stream if isinstance(stream, Guarded) else stream
    return result


def worker_line(line: str, stream: Any) -> str:
    """A line of a worker as it is printed to a stream; a terminal keeps its colours."""
    return marked(coloured(line)) if isinstance(stream, Guarded) else line


@contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and standard error where they are terminals."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        Guarded(one) if one.isatty() and not isinstance(one, Guarded) else one for one in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard(command: Any) -> None:
    """Run a typer command and its subcommands guarded.

    Help and usage errors are not guarded: their texts are ours.
    """
    for item in getattr(command, "commands", {}).values():
        guard(item)
    if command.callback is not None:
        command.callback = _within(command.callback)


def _within(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run(*given: Any, **named: Any) -> Any:
        with guarded():
            return callback(*given, **named)

    return run
