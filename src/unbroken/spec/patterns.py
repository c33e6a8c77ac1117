"""Patterns that users write: RE2, which takes time linear in the text whatever the pattern.

This is the only module that compiles a pattern from outside (`tools/check_patterns.py`). Constructs
that RE2 does not support (look-around, back-references) are refused, with their place and an
alternative. In RE2 `\\d`, `\\w`, `\\s` and `\\b` know ASCII only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import re2  # type: ignore[import-untyped]

from unbroken.errors import SpecError

PATTERN_CHARACTERS_MAX = 10_000
"""The most characters of one pattern.  RE2 compiles the worst pattern of this length in 0.25 s."""
_PLACES_TRIED = 20
_LOOK_BEYOND = 2
"""Characters that distinguish `(?P=` from `(?P<`, if the error quotes `(?P`."""
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"\(\?=", "look-ahead; write the text that must follow, as in `.*loss.*`"),
    (r"\(\?!", "negative look-ahead; match the wanted text, or exclude characters, as in `[^#].*`"),
    (r"\(\?<=", "look-behind; write the text before the group, as in `loss=(\\S+)`"),
    (r"\(\?<!", "negative look-behind; exclude the character before, as in `(?:^|[^a-z])loss`"),
    (r"\\[1-9]", "a back-reference; write out the text that may be repeated"),
    (r"\(\?P", "a named back-reference or a bad group name; write groups as `(?P<name>...)`"),
    (r"\(\?\(", "a conditional group; write both cases, as in `(?:first|second)`"),
    (r"\(\?>", "an atomic group; write `(?:...)`: RE2 never backtracks"),
    (r"[*+?}]\+$", "a possessive repetition; leave the second + out: RE2 never backtracks"),
    (r"\\Z", "\\Z; write `$`"),
    (r"\\[uUN]", "this escape; write the character itself, or `\\x{263A}`"),
    (r"\\b", "\\b inside [...]; write `\\x08`"),
    (r"\(\?#", "a comment; leave it out"),
    (r"\(\?[a-zA-Z-]", "this flag; RE2 knows the flags i, m, s and U"),
    (r"^\{\d", "more than 1,000 repetitions, nested ones multiplied; repeat less, or use `*`"),
)
"""Text that RE2's error quotes, and the alternative in RE2."""


class Pattern:
    """One compiled pattern.  Raises SpecError for what RE2 cannot compile."""

    def __init__(self, source: str) -> None:
        if len(source) > PATTERN_CHARACTERS_MAX:
            raise SpecError(f"must have at most {PATTERN_CHARACTERS_MAX} characters")
        self.source = source
        try:
            self._compiled = re2.compile(source, re2_options())
        except UnicodeEncodeError as error:
            raise SpecError(f"half a surrogate pair at character {error.start + 1}") from error
        except re2.error as error:
            raise SpecError(_explained(source, error)) from error
        self.groups: int = self._compiled.groups
        """Number of capture groups."""

    def is_match(self, line: bytes) -> bool:
        """True if the pattern matches from the start, as `re.match` in HyperPod agent 1.1.3."""
        return self._compiled.match(line) is not None

    def is_found(self, line: bytes) -> bool:
        """True if the pattern matches anywhere."""
        return self._compiled.search(line) is not None

    def is_whole(self, line: bytes) -> bool:
        """True if the pattern matches all of the line."""
        return self._compiled.fullmatch(line) is not None

    def first_group(self, line: bytes) -> str | None:
        """Return the text of group 1; None: it took no part, or the line does not match."""
        match = self._compiled.match(line)
        value: bytes | None = match and match.group(1)
        return None if value is None else value.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class PatternFacts:
    """Facts about a pattern, for its admission."""

    groups: int = 0
    matches_empty: bool = False
    problem: str = ""
    """Why RE2 cannot compile it; empty: it can."""


@lru_cache(maxsize=1024)
def pattern_facts(source: str) -> PatternFacts:
    """Describe a pattern; the compiled form, which may take megabytes, is not kept."""
    try:
        pattern = Pattern(source)
    except SpecError as error:
        return PatternFacts(problem=str(error))
    return PatternFacts(pattern.groups, pattern.is_match(b""))


def re2_options(memory_bytes: int | None = None) -> re2.Options:
    """Make options that keep RE2 from writing to stderr; `memory_bytes` None: RE2's default."""
    options = re2.Options()
    options.log_errors = False
    if memory_bytes is not None:
        options.max_mem = memory_bytes
    return options


def _explained(source: str, error: re2.error) -> str:
    """Explain the construct that RE2 refuses: its place, and an alternative."""
    reason, _, quoted = error.args[0].decode(errors="replace").partition(": ")
    if not quoted or reason.startswith(("missing", "unexpected")):
        return f"not a regular expression: {reason}"
    advice = next((advice for sign, advice in _ADVICE if re.search(sign, quoted)), None)
    place = _place(source, quoted, error.args[0])
    where = f" at character {place + 1}" if place is not None else ""
    why = f"RE2 does not know {advice}" if advice else reason
    return f"{quoted[:40]}{where}: {why}"


def _place(source: str, quoted: str, message: bytes) -> int | None:
    """Return the index of the construct that RE2 refuses: the text up to it fails in the same
    way."""
    start = -1
    for _ in range(_PLACES_TRIED):
        start = source.find(quoted, start + 1)
        if start < 0:
            return None
        try:
            re2.compile(source[: start + len(quoted) + _LOOK_BEYOND], re2_options())
        except re2.error as error:
            if error.args[0] == message:
                return start
    return None
