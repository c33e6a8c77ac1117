"""Lines fit for matching, made of the bytes of a worker's output.

A line ends at a newline or a carriage return, so each state of a progress bar is a line. Lines are
valid UTF-8 without terminal control sequences, never empty, and bounded. A longer line is several:
it is cut before a space where there is one, so that no number is cut and no later piece looks like
the beginning of a line.

A partial line is held back until its end comes: a block-buffered writer stops anywhere, even inside
a number. The one exception is a progress bar: it *begins* with its carriage return, so its newest
state has no end yet. `unfinished` shows what is held back.
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
        self._looked = 0
        """Bytes of the pending line that `unfinished` has returned."""
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
        is_plain = _is_plain(text) and _is_plain(self._pending)
        if self._pending:
            lines[0] = self._pending + lines[0]
        tail = lines.pop()
        if lines:
            if self._shown and lines[0] == self._shown:
                lines[0] = b""
            self._is_bar, self._shown, self._looked = carriage_return > newline, b"", 0
            if max(map(len, lines)) >= self._max:
                lines = [piece for line in lines for piece in self._pieces(line)]
        lines.extend(self._keep(tail, is_drained))
        return self._clean(lines, is_plain)

    def close(self) -> list[bytes]:
        """Return the unfinished line at the end of the stream."""
        tail = b"" if self._pending == self._shown else self._pending
        self._pending = self._shown = b""
        return self._clean([tail])

    def unfinished(self) -> list[bytes]:
        """Return what the pending line has got since the last call; its end may be cut."""
        new = b"" if self._pending == self._shown else self._pending[self._looked :]
        self._looked = len(self._pending)
        return self._clean([new])

    def _pieces(self, line: bytes) -> list[bytes]:
        """Cut a line that reaches the bound; all but the last piece are whole."""
        pieces, start = [], 0
        while len(line) - start >= self._max:
            end = line.rfind(b" ", start + self._max // 2, start + self._max)
            end = end if end > start else start + self._max
            pieces.append(line[start:end])
            start = end
        return [*pieces, line[start:]]

    def _keep(self, tail: bytes, is_drained: bool) -> list[bytes]:
        """Hold the unfinished line back; return what need not wait."""
        *lines, self._pending = self._pieces(tail)
        if lines:
            self._shown = b""
            self._looked = max(self._looked - (len(tail) - len(self._pending)), 0)
        if self._is_bar and is_drained and self._pending != self._shown:
            self._shown = self._pending
            lines.append(self._pending)
        return lines

    def _clean(self, lines: list[bytes], is_plain: bool = False) -> list[bytes]:
        """Return the lines cleaned. `is_plain`: they need no cleaning."""
        if is_plain:
            return [line for line in lines if line]
        return [clean for line in lines if line and (clean := self._line(line))]

    def _line(self, line: bytes) -> bytes:
        if b"\x1b" in line or b"\a" in line:
            line = _TERMINAL.sub(b"", line)
        return line if line.isascii() else line.decode(errors="replace").encode()


def _is_plain(text: bytes) -> bool:
    """Return True for ASCII without terminal sequences."""
    return text.isascii() and b"\x1b" not in text and b"\a" not in text
