"""Values captured from log lines: the numbers, the bad values, and their counts in a row.

Rules:

- NaN is bad whatever the operator: it counts like a value beyond the threshold. (HyperPod agent
  1.1.3 takes it as healthy and restarts the count; its documentation promises otherwise.)
- A text that is no number is bad too, once the rule has captured a number: before that, the pattern
  is more likely wrong than the job.
- A text without letters and digits (`?`, `--`), or an optional group that took no part, is no data
  point: it changes nothing.
- `1,234.5`, `42.1%` and `inf` are numbers.
- Data points are counted separately for each source (rank and stream), so that ranks that print the
  same metric in turn neither add up nor reset each other.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping

RankStream = tuple[int, str]
"""Rank and stream."""
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "eq": operator.eq,
}
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_NAN = re.compile(r"[+-]?(nan\b.*|1\.#(ind|qnan|snan)\d*)", re.IGNORECASE)


def read_value(text: str) -> float | None:
    """Return a captured text as a number; None: it is no data point. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        text = text.strip(" \t%,;:'\"()[]{}")
    if not any(map(str.isalnum, text)):
        return None
    if _NAN.fullmatch(text):
        return math.nan
    return float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)


class Meter:
    """Bad data points of one rule, by source."""

    def __init__(self, comparison: str, threshold: float, points: int) -> None:
        self._is_beyond = COMPARISONS[comparison]
        self._threshold = threshold
        self._points = points
        self._bad: dict[RankStream, int] = {}
        self._has_number = False
        self.unreadable = 0
        self.last = ""
        """The newest data point, as logged."""
        self.last_value: float | None = None
        self.what = f"last {points} values {comparison} {threshold:g} or no number"

    @property
    def is_slow(self) -> bool:
        """True if some source has enough bad data points in a row."""
        return self.bad_points >= self._points

    @property
    def bad_points(self) -> int:
        """Return the bad data points in a row, of the worst source."""
        return max(self._bad.values(), default=0)

    def add(self, source: RankStream, text: str) -> bool:
        """Add a captured text; return True if it completes the required number of bad ones."""
        try:
            value = read_value(text)
        except ValueError:
            value = math.nan
            self.unreadable += 1
            if not self._has_number:
                return False
        if value is None:
            return False
        is_nan = math.isnan(value)
        self.last, self.last_value = text.strip(), math.nan if is_nan else value
        self._has_number = self._has_number or not is_nan
        if not (is_nan or self._is_beyond(value, self._threshold)):
            self._bad.pop(source, None)
            return False
        count = self._bad[source] = self._bad.get(source, 0) + 1
        return count == self._points

    def forget(self, rank: int | None) -> None:
        """Restart the count for a rank; None: for all."""
        self._bad = {s: n for s, n in self._bad.items() if rank is not None and s[0] != rank}
