"""Lines fit for matching, made of the bytes of a worker's output.

A line ends at a newline or a carriage return, so each state of a progress bar is a line. Lines are
valid UTF-8 without terminal control sequences, never empty, and cut at a bound. The head is
returned once the bound is reached, the rest of that line is dropped.

A partial line is held back until its end comes: a block-buffered writer stops anywhere, even inside
a number. The one exception is a progress bar: it *begins* with its carriage return, so its newest
state has no end yet.
"""

from __future__ import annotations

import re

LINE_BYTES_MAX = 64 * 1024

_DELETED = bytes(c for c in range(32) if c not in b"\a\t\n\r\x1b") + b"\x7f"
"""Control characters without meaning in a log; BEL ends some terminal sequences, see there."""

_TERMINAL = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and other strings: titles, hyperlinks
    rb"|\x1b[ -/]*[0-~]?"  # the short ones
    rb"|\x07"
)


class LineAssembler:
    """The lines of one stream of one worker."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._max = line_bytes_max
        self._pending = b""
        """Start of the line whose end has not come."""
        self._is_cut = False
        """The head of this line was returned; the rest is dropped."""
        self._is_bar = False
        """The pending line began with a carriage return."""
        self._shown = b""
        """The pending bar as last returned."""

    def feed(self, data: bytes, is_drained: bool = True) -> list[bytes]:
        """Return the lines that end in `data`.

        `is_drained`: nothing more could be read at the time, so a bar at the end was written whole
        and counts.
        """
        text = data.translate(None, _DELETED)
        newline, carriage_return = text.rfind(b"\n"), text.rfind(b"\r")
        if carriage_return >= 0:
            text = text.replace(b"\r", b"\n")
        lines = text.split(b"\n")
        if self._is_cut:
            lines[0] = b""
        elif self._pending:
            lines[0] = self._pending + lines[0]
        tail = lines.pop()
        if lines:
            if self._shown and lines[0] == self._shown:
                lines[0] = b""
            self._is_bar, self._is_cut, self._shown = carriage_return > newline, False, b""
        lines.extend(self._keep(tail, is_drained))
        is_plain = text.isascii() and b"\x1b" not in text and b"\a" not in text
        return self._clean(lines, is_plain)

    def close(self) -> list[bytes]:
        """Return the unfinished line at the end of the stream."""
        tail = b"" if self._pending == self._shown else self._pending
        self._pending = self._shown = b""
        return self._clean([tail])

    def _keep(self, tail: bytes, is_drained: bool) -> list[bytes]:
        """Hold the unfinished line back; return what need not wait."""
        self._pending = tail
        if len(tail) >= self._max:
            self._pending, self._is_cut, self._shown = b"", True, b""
            return [tail]
        if self._is_bar and is_drained and tail != self._shown:
            self._shown = tail
            return [tail]
        return []

    def _clean(self, lines: list[bytes], is_plain: bool = False) -> list[bytes]:
        """Return the lines cleaned. `is_plain`: after the first, lines are ASCII without terminal
        sequences."""
        if is_plain and len(lines) > 1 and max(map(len, lines)) <= self._max:
            lines[0] = self._line(lines[0])
            return [line for line in lines if line]
        return [clean for line in lines if line and (clean := self._line(line))]

    def _line(self, line: bytes) -> bytes:
        if len(line) > self._max:
            line = line[: self._max]
        if b"\x1b" in line or b"\a" in line:
            line = _TERMINAL.sub(b"", line)
        return line if line.isascii() else line.decode(errors="replace").encode()
