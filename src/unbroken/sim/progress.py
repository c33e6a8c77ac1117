"""The progress of a run of many worlds: one line that is updated on a terminal, a line every few
seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

TERMINAL_SECONDS = 0.2
LINE_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Writes how far the run is, at most once in each interval."""

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._began = self._written_at = clock()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return self._clock() - self._began

    def update(self, done: int, failures: int) -> None:
        """Write a line if one is due."""
        now = self._clock()
        interval = TERMINAL_SECONDS if self._is_terminal else LINE_SECONDS
        if now < self._written_at + interval:
            return
        self._written_at = now
        text = describe(done, self._total, failures, now - self._began)
        self._stream.write(f"{CLEAR_LINE}{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()

    def write_line(self, text: str) -> None:
        """Write a line that stays."""
        self._stream.write(f"{CLEAR_LINE}{text}\n" if self._is_terminal else f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Remove the line from the terminal, so that the result begins at its start."""
        if self._is_terminal:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()


def describe(done: int, total: int, failures: int, seconds: float) -> str:
    """Seeds done, seeds a second, failures so far, and the time that is left at this rate."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{_span((total - done) / rate)} left" if rate else "time left unknown"
    failed = "1 failure" if failures == 1 else f"{failures} failures"
    return f"{done:,} of {total:,} seeds, {rate:.0f} seeds/s, {failed}, {left}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
