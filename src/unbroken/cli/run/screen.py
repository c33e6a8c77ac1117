"""What a person who runs a job sees: its output, notes and, on a terminal, its state below."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from unbroken.cli.terminal import coloured, raw, visible, worker_line

if TYPE_CHECKING:
    from rich.console import Console


class Screen(Protocol):
    """Where a job is followed."""

    is_live: bool
    """It has a place for state."""

    def output(self, line: str) -> None:
        """A line that the job wrote."""

    def note(self, text: str) -> None:
        """Something that we say."""

    def state(self, lines: Sequence[str]) -> None:
        """How the job is now."""

    def __enter__(self) -> Self:
        """Take the screen."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Give it back."""


class PlainScreen:
    """Lines: the job's on one stream, ours on standard error."""

    is_live = False

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_read = True

    def output(self, line: str) -> None:
        """A line that the job wrote."""
        if self._is_read:
            try:
                print(worker_line(line, self._output), file=self._output, flush=True)
            except BrokenPipeError:
                self._is_read = False
                self.note("nobody reads the output any more; the job goes on")

    def note(self, text: str) -> None:
        """Something that we say."""
        print(f"unbroken: {text}", file=sys.stderr, flush=True)

    def state(self, lines: Sequence[str]) -> None:
        """A log has no place for what changes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class LiveScreen:
    """A terminal: output scrolls above, the state stays below it."""

    is_live = True

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def output(self, line: str) -> None:
        """A line that the job wrote."""
        from rich.text import Text

        self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Something that we say."""
        shown = f"unbroken: {visible(text)}"
        self._console.print(shown, style="bold yellow", markup=False, soft_wrap=True)

    def state(self, lines: Sequence[str]) -> None:
        """How the job is now: a first line that matters most, and details."""
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


def open_screen(*, is_json: bool) -> Screen:
    """The screen that fits where output goes; JSON wants standard output for itself."""
    if is_json:
        return PlainScreen(sys.stderr)
    if sys.stdout.isatty():
        from rich.console import Console

        return LiveScreen(Console(file=raw(sys.stdout)))
    return PlainScreen(sys.stdout)
