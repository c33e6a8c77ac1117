"""The screen of `unbroken run`: output of the job, notes and, on a terminal, the state below."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from unbroken.cli.terminal import coloured, raw, visible, worker_line

if TYPE_CHECKING:
    from rich.console import Console


class Screen(Protocol):
    """The display of a job that is followed."""

    is_live: bool
    """True if the screen shows the state."""

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; `is_error`: of its standard error."""

    def note(self, text: str) -> None:
        """Print a note of the command."""

    def state(self, lines: Sequence[str]) -> None:
        """Show the state of the job."""

    def __enter__(self) -> Self:
        """Start to use the screen."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Release the screen."""


class PlainScreen:
    """Plain lines: the job's output on a stream, notes on standard error."""

    is_live = False

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_read = True

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; `is_error`: of its standard error."""
        if self._is_read or is_error:
            stream = sys.stderr if is_error else self._output
            try:
                print(worker_line(line, stream), file=stream, flush=True)
            except BrokenPipeError:
                self._is_read = False
                self.note("the reader of the output is gone; the job continues")

    def note(self, text: str) -> None:
        """Print a note of the command."""
        print(f"unbroken: {text}", file=sys.stderr, flush=True)

    def state(self, lines: Sequence[str]) -> None:
        """Ignore the state: plain lines cannot be updated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class LiveScreen:
    """A terminal: the output scrolls above the state."""

    is_live = True

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; the terminal shows both streams."""
        from rich.text import Text

        self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a note of the command."""
        shown = f"unbroken: {visible(text)}"
        self._console.print(shown, style="bold yellow", markup=False, soft_wrap=True)

    def state(self, lines: Sequence[str]) -> None:
        """Show the state of the job: a summary and lines of details."""
        from rich.text import Text

        first, *rest = map(visible, lines)
        text = Text(first, style="bold", no_wrap=True, overflow="ellipsis")
        for line in rest:
            text.append(f"\n  {line}", style="dim not bold")
        self._live.update(text, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def is_one_place() -> bool:
    """True if standard output and standard error end at one file, pipe or terminal."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:
        return True


def open_screen(*, is_data: bool) -> Screen:
    """The screen for standard output; with `is_data`, lines go to standard error."""
    if is_data:
        return PlainScreen(sys.stderr)
    if sys.stdout.isatty():
        from rich.console import Console

        return LiveScreen(Console(file=raw(sys.stdout)))
    return PlainScreen(sys.stdout)
