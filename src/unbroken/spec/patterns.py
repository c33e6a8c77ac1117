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
"""The most characters of one pattern, and of all patterns of a job."""
COSTLY_ITEMS_MAX = 400
"""The most Unicode classes (`\\pL`) and counted repetitions (`{9}`) of one pattern, and of all
patterns of a job. Reading one takes RE2 up to 0.3 ms; a plain character takes 0.003 ms."""
PATTERN_MEMORY_BYTES = 1 << 20
"""RE2's memory for a user's pattern. Its program has at most PROGRAM_SIZE_MAX instructions, which
compile in about 4 ms; with RE2's default of 8 MiB, 8 characters can take 0.2 s and 4 MB."""
PROGRAM_SIZE_MAX = PATTERN_MEMORY_BYTES // 4 // 16
"""The most instructions of one pattern (`Compiler::Setup` of RE2: a quarter of the memory, 16 bytes
each)."""
TRUSTED_MEMORY_BYTES = 8 << 20
"""RE2's default, for patterns of the definitions that an administrator installs."""
_PLACES_TRIED = 3
_LOOK_BEYOND = 2
"""Characters that distinguish `(?P=` from `(?P<`, if the error quotes `(?P`."""
_TOO_LARGE = b"pattern too large"
TOO_LARGE = (
    "too large: RE2's program for it has more than "
    f"{PROGRAM_SIZE_MAX} instructions; use smaller counted repetitions of fewer characters, as in "
    "`.*` for `\\pL{400}`"
)
TOO_MANY_ITEMS = (
    f"must have at most {COSTLY_ITEMS_MAX} Unicode classes (`\\pL`) and counted repetitions "
    "(`{9}`)"
)
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


class PatternTooLarge(SpecError):
    """The program of a pattern needs more memory than it may have."""


class Pattern:
    """One compiled pattern.  Raises SpecError for what RE2 cannot compile."""

    def __init__(self, source: str, memory_bytes: int = PATTERN_MEMORY_BYTES) -> None:
        if len(source) > PATTERN_CHARACTERS_MAX:
            raise SpecError(f"must have at most {PATTERN_CHARACTERS_MAX} characters")
        if costly_items(source) > COSTLY_ITEMS_MAX:
            raise SpecError(TOO_MANY_ITEMS)
        self.source = source
        try:
            self._compiled = re2.compile(source, re2_options(memory_bytes))
        except UnicodeEncodeError as error:
            raise SpecError(f"half a surrogate pair at character {error.start + 1}") from error
        except re2.error as error:
            if error.args[0].startswith(_TOO_LARGE):
                raise PatternTooLarge(TOO_LARGE) from error
            raise SpecError(_explained(source, error)) from error
        self.groups: int = self._compiled.groups
        """Number of capture groups."""
        self.size: int = self._compiled.programsize
        """Instructions of its program."""

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


def costly_items(source: str) -> int:
    """Count the constructs of a pattern that RE2 takes long to read; never too few."""
    return source.count("\\p") + source.count("\\P") + source.count("{")


@dataclass(frozen=True, slots=True)
class PatternFacts:
    """Facts about a pattern, for its admission."""

    groups: int = 0
    matches_empty: bool = False
    size: int = 0
    """Instructions of its program: PROGRAM_SIZE_MAX if it is too large."""
    problem: str = ""
    """Why RE2 cannot compile it; empty: it can."""


@lru_cache(maxsize=1024)
def pattern_facts(source: str) -> PatternFacts:
    """Describe a pattern; the compiled form, which may take megabytes, is not kept."""
    try:
        pattern = Pattern(source)
    except PatternTooLarge as error:
        return PatternFacts(size=PROGRAM_SIZE_MAX, problem=str(error))
    except SpecError as error:
        return PatternFacts(problem=str(error))
    return PatternFacts(pattern.groups, pattern.is_match(b""), pattern.size)


def re2_options(memory_bytes: int) -> re2.Options:
    """Make options that bound RE2's memory and keep it from writing to stderr."""
    options = re2.Options()
    options.log_errors = False
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
            end = start + len(quoted) + _LOOK_BEYOND
            re2.compile(source[:end], re2_options(PATTERN_MEMORY_BYTES))
        except re2.error as error:
            if error.args[0] == message:
                return start
    return None
