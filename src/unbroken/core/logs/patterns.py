"""Several patterns at once: which of them match a line, in one pass over it."""

from __future__ import annotations

from collections.abc import Sequence

import re2  # type: ignore[import-untyped]

from unbroken.spec.patterns import Pattern, re2_options

SET_MEMORY_BYTES = 32 << 20
"""Bytes for the automaton of all patterns; it fills as lines need it."""


class PatternSet:
    """Matcher of several patterns against one line."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        self._set = _compile_set([pattern.source for pattern in patterns])

    def match(self, line: bytes) -> list[int]:
        """Return the indexes of the patterns that match, ascending."""
        if self._set is None:
            return [i for i, pattern in enumerate(self._patterns) if pattern.is_match(line)]
        result: list[int] = self._set.Match(line) or []
        if len(result) > 1:
            result.sort()
        return result


def _compile_set(sources: Sequence[str]) -> re2.Set | None:
    """Return the patterns compiled as a set; None: there are none, or they are too large for one
    automaton.

    A set that lacks memory returns "no match" instead of an error. So a twin with one more pattern,
    which matches everything, is asked first.
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
    patterns = re2.Set.MatchSet(re2_options(SET_MEMORY_BYTES))
    for source in sources:
        patterns.Add(source)
    patterns.Compile()
    return patterns
