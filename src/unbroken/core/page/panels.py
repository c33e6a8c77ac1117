"""Panels of dashboards for the live page: their queries, and the series of the answers.

Pure. Names of series come from labels that other programs write, so they are cut and have no
characters that are not printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unbroken.foreign_numbers import finite_number

SCRAPE_SECONDS = 15
"""Seconds between scrapes, as the guide and the chart configure them."""
RATE_SCRAPES = 4
"""Scrapes within the shortest interval of a rate, as Grafana's `$__rate_interval` has them."""
SERIES_MAX = 20
"""Series that a panel shows."""
NAME_MAX = 100
"""Characters of a series' name."""
VALUE_MAX = 1e300
NOT_PRINTED = "\N{REPLACEMENT CHARACTER}"
_VARIABLE = re.compile(r"\$(\w+)")
_LABEL = re.compile(r"{{(\w+)}}")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A stretch of time that a dashboard shows, and the distance of its points."""

    seconds: int
    step_seconds: int

    @property
    def rate_seconds(self) -> int:
        """Seconds over which a rate is computed."""
        return max(RATE_SCRAPES * SCRAPE_SECONDS, self.step_seconds + SCRAPE_SECONDS)

    def times(self, now: float) -> list[int]:
        """Times of the points up to `now`, in whole steps, so that later ones are the same."""
        last = int(now) // self.step_seconds * self.step_seconds
        count = self.seconds // self.step_seconds
        return [last - self.step_seconds * back for back in range(count, -1, -1)]


SPANS: Mapping[str, TimeSpan] = {
    "15m": TimeSpan(900, 10),
    "1h": TimeSpan(3600, 30),
    "6h": TimeSpan(6 * 3600, 180),
    "24h": TimeSpan(24 * 3600, 720),
    "7d": TimeSpan(7 * 24 * 3600, 5040),
}
"""Name of a span in an address -> the span."""
DEFAULT_SPAN = "1h"


@dataclass(frozen=True, slots=True)
class PanelSeries:
    """One series of a panel."""

    name: str
    newest: float | None
    """Newest value of the span; None: it has none."""
    values: tuple[float | None, ...] = ()
    """Values at the times of the span; None: a gap. Empty if the panel shows newest values only."""


def filled_query(expression: str, variables: Iterable[str], span: TimeSpan) -> str:
    """Return a panel's query in which each variable of the dashboard selects all values."""
    filled = expression.replace("$__rate_interval", f"{span.rate_seconds}s")
    filled = filled.replace("$__range", f"{span.seconds}s")
    known = set(variables)
    return _VARIABLE.sub(lambda match: ".*" if match[1] in known else match[0], filled)


def series_name(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series: the legend with its labels filled in, or else all labels."""
    name = _LABEL.sub(lambda match: labels.get(match[1], ""), legend).strip()
    if not name:
        name = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    shown = "".join(one if one.isprintable() else NOT_PRINTED for one in name[: NAME_MAX + 1])
    return shown if len(name) <= NAME_MAX else f"{shown[: NAME_MAX - 1]}…"


def placed_values(
    times: Sequence[int], samples: Iterable[tuple[float, str]]
) -> tuple[float | None, ...]:
    """Return the value at each time; None where there is none, or no number."""
    at = {round(time): sample_value(text) for time, text in samples}
    return tuple(at.get(time) for time in times)


def sample_value(text: str) -> float | None:
    """Return the value of a sample; None for NaN and infinity."""
    return finite_number(text, -VALUE_MAX, VALUE_MAX)


def newest_value(values: Sequence[float | None]) -> float | None:
    """Return the last value that is there."""
    return next((one for one in reversed(values) if one is not None), None)


def shown_series(series: Iterable[PanelSeries]) -> tuple[list[PanelSeries], int]:
    """Return the series that a panel shows, by name, and the number of the others.

    Of too many, those with the greatest values are shown. Series without a value are left out.
    """
    found = [one for one in series if one.newest is not None]
    greatest = sorted(found, key=_greatest, reverse=True)[:SERIES_MAX]
    return sorted(greatest, key=lambda one: _place(one.name)), len(found) - len(greatest)


def _greatest(series: PanelSeries) -> float:
    return max(value for value in (series.newest, *series.values) if value is not None)


def _place(name: str) -> list[tuple[float, str]]:
    """Return a key by which numbers within names are in order; `+Inf` is the last."""
    parts = _NUMBER.split(name.replace("+Inf", f"{10**15}"))
    return [
        (finite_number(part, 0, VALUE_MAX) or 0.0, "") if number % 2 else (0.0, part)
        for number, part in enumerate(parts)
    ]
