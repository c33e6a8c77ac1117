"""Users' patterns: RE2, which takes time linear in the line whatever the pattern.

What RE2 cannot express (look-around, back-references) runs on `re`, which can take for ever on an
unlucky line: `is_linear` is False and whoever admits the pattern warns.  A pattern matches from the
start of a line (`re.match`), as in HyperPod agent 1.1.3.  In RE2 `\\d`, `\\w`, `\\s` and `\\b` know
ASCII only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Protocol

import re2  # type: ignore[import-untyped]

from unbroken.errors import SpecError

PATTERN_CHARACTERS_MAX = 10_000
SET_MEMORY_BYTES = 32 << 20
"""Room for the automaton of all patterns; it fills as lines need it."""


class Pattern(Protocol):
    """One compiled pattern."""

    @property
    def source(self) -> str: ...

    @property
    def groups(self) -> int:
        """Number of capture groups."""

    @property
    def is_linear(self) -> bool: ...

    def is_match(self, line: bytes) -> bool: ...

    def first_group(self, line: bytes) -> str | None:
        """What group 1 captured; None where it took no part or the line does not match."""


class LinearPattern:
    """A pattern on RE2."""

    is_linear = True

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled = re2.compile(source, _options())
        self.groups: int = self._compiled.groups

    def is_match(self, line: bytes) -> bool:
        """True where the pattern matches from the start."""
        return self._compiled.match(line) is not None

    def first_group(self, line: bytes) -> str | None:
        """What group 1 captured."""
        match = self._compiled.match(line)
        value: bytes | None = match and match.group(1)
        return None if value is None else value.decode(errors="replace")


class BacktrackingPattern:
    """A pattern on `re`."""

    is_linear = False

    def __init__(self, source: str) -> None:
        self.source = source
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested sets: advice for whoever writes Python
            self._compiled = re.compile(source)
        self.groups = self._compiled.groups

    def is_match(self, line: bytes) -> bool:
        """True where the pattern matches from the start."""
        return self._compiled.match(line.decode(errors="replace")) is not None

    def first_group(self, line: bytes) -> str | None:
        """What group 1 captured."""
        match = self._compiled.match(line.decode(errors="replace"))
        return match.group(1) if match else None


def compile_pattern(source: str) -> Pattern:
    """Compile for RE2, else for `re`.  Raises SpecError where neither takes it."""
    if len(source) > PATTERN_CHARACTERS_MAX:
        raise SpecError(f"longer than {PATTERN_CHARACTERS_MAX} characters")
    try:
        return LinearPattern(source)
    except (re2.error, UnicodeEncodeError):
        pass  # `re` may take it; where it does not, its message is the one that Python users know
    try:
        return BacktrackingPattern(source)
    except (re.error, RecursionError, OverflowError) as error:
        raise SpecError(f"not a regular expression: {error}") from error


class PatternSet:
    """Which of several patterns match a line, in one pass over it."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        linear = [i for i, pattern in enumerate(patterns) if pattern.is_linear]
        self._set = _compile_set([patterns[i].source for i in linear])
        if self._set is None:
            linear = []
        self._numbers = None if len(linear) == len(patterns) else linear
        """Index of each pattern of the set; None: the same."""
        self._others = [(i, patterns[i]) for i in range(len(patterns)) if i not in set(linear)]

    def match(self, line: bytes) -> list[int]:
        """Indexes of the patterns that match, ascending."""
        found: list[int] = (self._set.Match(line) or []) if self._set else []
        if self._numbers is not None:
            found = [self._numbers[i] for i in found]
            found += [i for i, pattern in self._others if pattern.is_match(line)]
        if len(found) > 1:
            found.sort()
        return found


def _options(memory_bytes: int | None = None) -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    if memory_bytes is not None:
        options.max_mem = memory_bytes
    return options


def _compile_set(sources: Sequence[str]) -> re2.Set | None:
    """None where there are none, or where together they are too large for one automaton.

    A set that lacks memory says "no match" instead of failing, so a twin with one more pattern that
    matches everything is asked first.
    """
    if not sources:
        return None
    try:
        twin = _build_set([*sources, ""])
        if twin.Match(b"") is None:
            return None
        return _build_set(sources)
    except re2.error:
        return None


def _build_set(sources: Sequence[str]) -> re2.Set:
    patterns = re2.Set.MatchSet(_options(SET_MEMORY_BYTES))
    for source in sources:
        patterns.Add(source)
    patterns.Compile()
    return patterns
