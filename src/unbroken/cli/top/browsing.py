"""The place of a person in `unbroken top`: open screens, marked line, keys.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .views import OVERVIEW, Line, Target

KEYS = {
    **{b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up"},
    **{b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down"},
    **{b"\x1b[5~": "page up", b"\x1b[6~": "page down", b" ": "page down"},
    **{b"\x1b[C": "open", b"\x1bOC": "open", b"\r": "open", b"\n": "open"},
    **{b"\x1b[D": "back", b"\x1bOD": "back", b"\x7f": "back", b"\x08": "back"},
    b"q": "quit",
}
"""Keys of a terminal: with and without application mode."""
HELP = "up/down: move   Enter: open   Backspace: back   q: quit"
_KEY = re.compile(rb"\x1b\[[0-9;]*[@-~]|\x1bO[@-~]|[^\x1b]|\x1b(?=[^\[O])", re.DOTALL)
UNFINISHED_MAX = 16
"""Bytes of an escape sequence that is not complete; a longer one is dropped."""


def read_keys(data: bytes) -> tuple[list[str], bytes]:
    """Names of the pressed keys, and the beginning of a key that has not arrived completely."""
    found, end = [], 0
    while (match := _KEY.match(data, end)) is not None:
        end = match.end()
        if name := KEYS.get(match[0]):
            found.append(name)
    left = data[end:]
    return found, left if len(left) <= UNFINISHED_MAX else b""


@dataclass(frozen=True, slots=True)
class OpenScreen:
    """A screen with the place in it."""

    target: Target
    line: int = -1
    """Number of the marked line; -1: no key was pressed, so the first that opens a screen."""
    top: int = 0
    """Number of the first line in the window."""


@dataclass(slots=True)
class Browsing:
    """The screens that were opened one from another; the last one is shown."""

    first: Target = OVERVIEW
    has_ended: bool = False
    screens: list[OpenScreen] = field(init=False)

    def __post_init__(self) -> None:
        self.screens = [OpenScreen(self.first)]

    @property
    def target(self) -> Target:
        """The screen that is shown."""
        return self.screens[-1].target

    def press(self, key: str, lines: Sequence[Line], height: int) -> None:
        """Take a key; `lines` are those of the screen, `height` those of its window."""
        here = replace(self.screens[-1], line=self.window(lines, height)[1])
        moves = {"up": -1, "down": 1, "page up": -height, "page down": height}
        match key:
            case "quit":
                self.has_ended = True
            case "back":
                if len(self.screens) > 1:
                    self.screens.pop()
                elif self.first != OVERVIEW:
                    self.first = OVERVIEW
                    self.screens = [OpenScreen(OVERVIEW)]
            case "open":
                target = lines[here.line].target
                if target is not None:
                    self.screens.append(OpenScreen(target))
            case _:
                self.screens[-1] = replace(here, line=max(here.line + moves[key], 0))

    def window(self, lines: Sequence[Line], height: int) -> tuple[int, int]:
        """The number of the first line in the window, and of the marked one."""
        here = self.screens[-1]
        line = min(here.line, len(lines) - 1)
        if line < 0:
            opening = (number for number, one in enumerate(lines[:height]) if one.target)
            line = next(opening, 0)
        top = max(min(here.top, line), line - height + 1, 0)
        top = min(top, max(len(lines) - height, 0))
        self.screens[-1] = replace(here, top=top)
        return top, line
