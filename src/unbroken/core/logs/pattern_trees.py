"""Facts about a pattern that hold for every line: sound, but not complete.

It reads what Python's `re` and RE2 have in common.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from functools import lru_cache

from unbroken.foreign_numbers import whole_number

NEVER = math.inf
"""A length that means: no such text exists."""
_CLASSES = "dDwWsS"
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_COUNT = re.compile(r"\{(\d*+)(,?)(\d*+)\}")
_GROUP = re.compile(r"\?(?:P?<([A-Za-z_]\w*)>|:|>|([imsU-]+):|([=!]|<=|<!))")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]")
_LETTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|x\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})|(0[0-7]{0,2}))"
)
_SKIPPED = re.compile(r"\(\?(?:#[^)]*|[imsuaU]+)\)")


class Unreadable(Exception):
    """The pattern has a construct that is not known here."""


@dataclass(frozen=True, slots=True)
class Char:
    """One character out of `text`; empty: of a class."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class LineEdge:
    """The line's start or end."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Anything:
    """A part of which nothing is known; perhaps empty."""


@dataclass(frozen=True, slots=True)
class Series:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    item: Node
    least: int
    is_endless: bool
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Capture:
    number: int
    item: Node
    source: str
    """The text between the parentheses."""


Node = Char | LineEdge | Anything | Series | Choice | Repetition | Capture


@lru_cache(maxsize=1 << 16)
def shortest(node: Node, is_begun: bool = False, goes_on: bool = False) -> float:
    """Return the fewest characters of a line that the pattern takes; NEVER: no line has them.

    `is_begun`: characters come before it for certain; `goes_on`: after it.
    """
    match node:
        case Char(text):
            return NEVER if text and not any(map(_is_of_a_line, text)) else 1
        case LineEdge(is_start):
            return NEVER if (is_begun if is_start else goes_on) else 0
        case Anything():
            return 0
        case Series(items):
            return _shortest_series(items, is_begun, goes_on)
        case Choice(options):
            return min(shortest(option, is_begun, goes_on) for option in options)
        case Capture(_, item):
            return shortest(item, is_begun, goes_on)
        case Repetition(item, least):
            once = shortest(item, is_begun, goes_on) if least else 0.0
            if least > 1 and once and shortest(item, True, goes_on) == NEVER:
                return NEVER
            return once * max(least, 1)


def _shortest_series(items: tuple[Node, ...], is_begun: bool, goes_on: bool) -> float:
    alone = [shortest(one) for one in items]
    total = 0.0
    for index, one in enumerate(items):
        follows = goes_on or sum(alone[index + 1 :]) > 0
        total += shortest(one, is_begun or total > 0, follows)
    return total


def _is_of_a_line(char: str) -> bool:
    """True for characters that lines can have. Control characters are removed from lines before
    they are matched."""
    return char == "\t" or (ord(char) >= 32 and char != "\x7f")


def is_anchored(node: Node) -> bool:
    """Return True if the pattern matches at the start of a line only."""
    match node:
        case LineEdge(is_start):
            return is_start
        case Choice(options):
            return all(is_anchored(option) for option in options)
        case Series(items):
            return bool(items) and is_anchored(items[0])
        case Capture(_, item):
            return is_anchored(item)
        case Repetition(item, least):
            return least > 0 and is_anchored(item)
        case _:
            return False


def captures(node: Node) -> list[tuple[Capture, bool, bool]]:
    """Return all groups: whether each may take no part, and whether a greedy `.*` stands right
    before it."""
    return list(_captures(node, False, False))


def _captures(node: Node, is_optional: bool, is_eaten: bool) -> list[tuple[Capture, bool, bool]]:
    match node:
        case Capture(_, item):
            return [(node, is_optional, is_eaten), *_captures(item, is_optional, is_eaten)]
        case Repetition(item, least):
            return _captures(item, is_optional or not least, is_eaten)
        case Choice(options):
            may_miss = is_optional or len(options) > 1
            return [
                capture for option in options for capture in _captures(option, may_miss, is_eaten)
            ]
        case Series(items):
            found = []
            for index, one in enumerate(items):
                before = items[index - 1] if index else None
                eats = isinstance(before, Repetition) and before.is_greedy and before.is_endless
                eats = eats and isinstance(before, Repetition) and before.item == Char()
                found += _captures(one, is_optional, eats or (not index and is_eaten))
            return found
        case _:
            return []


def read_pattern(source: str) -> Node:
    """Return the pattern's tree. Raises Unreadable."""
    reader = _Reader(source)
    node = reader.choice()
    if reader.at < len(source):
        raise Unreadable(source)
    return node


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.groups = 0

    def choice(self) -> Node:
        options = [self.series()]
        while self._next() == "|":
            self.at += 1
            options.append(self.series())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def series(self) -> Node:
        items: list[Node] = []
        while self._next() not in ("", "|", ")"):
            if skipped := _SKIPPED.match(self.source, self.at):
                self.at = skipped.end()
                continue
            items.append(self.repeated(self.atom()))
        return items[0] if len(items) == 1 else Series(tuple(items))

    def repeated(self, item: Node) -> Node:
        char, counted = self._next(), _COUNT.match(self.source, self.at)
        if char and char in "*+?":
            self.at += 1
            return Repetition(item, int(char == "+"), char != "?", self._is_greedy())
        if char != "{" or not counted or not (counted[1] or counted[3]):
            return item
        if not counted[1]:
            raise Unreadable("{,n} is read in two ways")
        least = whole_number(counted[1])
        if least is None:
            raise Unreadable(self.source)
        self.at = counted.end()
        is_endless = bool(counted[2]) and not counted[3]
        return Repetition(item, least, is_endless, self._is_greedy())

    def atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == "\\":
            return self.escape()
        self.at += 1
        if char in "^$":
            return LineEdge(char == "^")
        return Char() if char == "." else Char(char)

    def group(self) -> Node:
        head = _GROUP.match(self.source, self.at + 1)
        if head is None and self.source[self.at + 1 : self.at + 2] == "?":
            raise Unreadable(self.source)
        is_capture, is_look = head is None or bool(head[1]), bool(head and head[3])
        self.at = head.end() if head else self.at + 1
        start, number = self.at, self.groups + 1
        self.groups += is_capture
        inside = self.choice()
        if self._next() != ")":
            raise Unreadable(self.source)
        source = self.source[start : self.at]
        self.at += 1
        if is_look:
            return Anything()
        return Capture(number, inside, source) if is_capture else inside

    def char_class(self) -> Node:
        match = _CLASS.match(self.source, self.at)
        if match is None:
            raise Unreadable(self.source)
        self.at = match.end()
        inside = match[0][1:-1]
        letters = re.fullmatch(r"(?:\\[nrfva])+", inside)
        return Char("".join(_CONTROLS[c] for c in inside[1::2])) if letters else CLASS

    def escape(self) -> Node:
        if letter := _LETTER.match(self.source, self.at):
            self.at = letter.end()
            hexadecimal = letter[1] or letter[2] or letter[3]
            code = int(hexadecimal, 16) if hexadecimal else int(letter[4], 8)
            if code > sys.maxunicode:
                raise Unreadable(self.source)
            return Char(chr(code))
        char = self.source[self.at + 1 : self.at + 2]
        self.at += 2
        if char in "AZz":
            return LineEdge(char == "A")
        if char in "bB" or char.isdigit():
            return Anything()
        if char in _CLASSES:
            return CLASS
        if not char or (char.isalpha() and char not in _CONTROLS):
            raise Unreadable(self.source)
        return Char(_CONTROLS.get(char, char))

    def _is_greedy(self) -> bool:
        char = self._next()
        if char and char in "?+":
            self.at += 1
        return char != "?"

    def _next(self) -> str:
        return self.source[self.at : self.at + 1]


CLASS = Char("0")
"""Some character of a class; the digit has no meaning."""
