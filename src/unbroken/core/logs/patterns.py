"""Several patterns at once: which of them match a line, in one pass over it."""

from __future__ import annotations

from collections.abc import Sequence

import re2  # type: ignore[import-untyped]

from unbroken.spec.patterns import Pattern, re2_options

SET_MEMORY_BYTES = 32 << 20
"""Bytes for the automaton of all patterns; it fills as lines need it."""


class PatternSet:
    """Matcher of several patterns against one line; it has no other state.

    A set that lacks memory returns "no match" instead of an error. So it has one more pattern,
    which matches everything: if that is missing, the patterns are asked one by one.
    """

    def __init__(self, patterns: Sequence[Pattern], memory_bytes: int = SET_MEMORY_BYTES) -> None:
        self._patterns = patterns
        self._set = _compile_set([one.source for one in patterns], memory_bytes)

    def __len__(self) -> int:
        return len(self._patterns)

    def match(self, line: bytes) -> list[int]:
        """Return the indexes of the patterns that match, ascending."""
        result: list[int] | None = None if self._set is None else self._set.Match(line)
        if not result:
            return [i for i, pattern in enumerate(self._patterns) if pattern.is_match(line)]
        if len(result) > 1:
            result.sort()
        result.pop()
        return result


def _compile_set(sources: Sequence[str], memory_bytes: int) -> re2.Set | None:
    """Return a set of the patterns and of one that matches everything.

    None: no patterns are given, or they are too large for one automaton.
    """
    if not sources:
        return None
    try:
        patterns = re2.Set.MatchSet(re2_options(memory_bytes))
        for source in (*sources, ""):
            patterns.Add(source)
        patterns.Compile()
        return patterns
    except re2.error:
        return None
