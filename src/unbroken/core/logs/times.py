"""The time at which a recorded line was written, from the line itself.

Times without a zone are taken as UTC; those without a year or a day follow the time before.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Callable
from datetime import UTC, datetime

from unbroken.errors import SpecError

SEARCHED_BYTES = 300
"""Bytes of a line that are searched: later text is no time stamp."""
DAY_SECONDS, YEAR_SECONDS = 86_400.0, 366 * 86_400.0
NO_YEAR = 2000
"""Year for times without one; a leap year, so that every day exists."""

Finder = Callable[[bytes], float | None]
MONTHS = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_CLOCK = rb"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
ISO = re.compile(
    rb"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[T_ ]" + _CLOCK + rb"(?: ?(Z|[+-]\d\d:?\d\d)(?!\d))?"
)
SYSLOG = re.compile(rb"\b(" + b"|".join(MONTHS) + rb") +(\d\d?) " + _CLOCK + rb"(?: (\d{4})\b)?")
GLOG = re.compile(rb"(?:^|[\[ ])[CDEFIVW](\d\d?)(\d\d) " + _CLOCK)
EPOCH = re.compile(
    rb'(?:^\W{0,3}|"(?:ts|time|timestamp|created)": ?)'
    rb"(?:(1\d{12})|(1\d{9})(?:[.,](\d{1,9}))?)(?!\d)"
)
DIRECTIVES = {
    "Y": r"\d{4}",
    "y": r"\d\d",
    "m": r"\d\d?",
    "d": r"\d\d?",
    "H": r"\d\d?",
    "I": r"\d\d?",
    "M": r"\d\d",
    "S": r"\d\d",
    "f": r"\d{1,6}",
    "j": r"\d{1,3}",
    "b": r"[A-Za-z]{3}",
    "B": r"[A-Za-z]{3,9}",
    "a": r"[A-Za-z]{3}",
    "A": r"[A-Za-z]{6,9}",
    "p": r"[AaPp][Mm]",
    "z": r"(?:Z|[+-]\d\d:?\d\d)",
    "%": "%",
}
"""Patterns of strptime's codes, as they look in a line."""


class Times:
    """The times of one file's lines; it remembers the format that the file has."""

    def __init__(self, form: str = "auto") -> None:
        self._finders = finders(form)
        self._last = 0.0

    def read(self, line: bytes) -> float | None:
        """Return seconds since the epoch; None: the line has no time."""
        head = line[:SEARCHED_BYTES]
        for index, (find, period) in enumerate(self._finders):
            try:
                at = find(head)
            except (ValueError, OverflowError):
                continue  # looks like one and is none: the 31st of June
            if at is None:
                continue
            while period and at < self._last - period / 2:
                at += period
            self._last = at
            if index:
                self._finders.insert(0, self._finders.pop(index))
            return at
        return None


def finders(form: str) -> list[tuple[Finder, float]]:
    """Return the finders of a format's times, each with the period of its times in seconds (0:
    none).

    Raises SpecError for an unknown format.
    """
    named = {"iso": (_iso, 0.0), "syslog": (_syslog, YEAR_SECONDS)}
    named |= {"glog": (_glog, YEAR_SECONDS), "epoch": (_epoch, 0.0)}
    if form == "auto":
        return list(named.values())
    if form in named:
        return [named[form]]
    if "%" not in form:
        raise SpecError(
            f"time format {form!r} is none of auto, {', '.join(named)}, and no strptime format "
            "such as '%d.%m.%Y %H:%M:%S'"
        )
    return [_custom(form)]


def _custom(form: str) -> tuple[Finder, float]:
    parts = []
    for literal, letter in re.findall(r"([^%]*)(%.|$)", form):
        if letter and letter[1] not in DIRECTIVES:
            raise SpecError(f"time format {form!r}: {letter} is not known here")
        parts.append(re.escape(literal) + (DIRECTIVES[letter[1]] if letter else ""))
    expression = re.compile("".join(parts))
    has_year = any(f"%{letter}" in form for letter in "Yy")
    has_day = any(f"%{letter}" in form for letter in "dj")
    whole = form if has_year else f"%Y {form}"

    def find(head: bytes) -> float | None:
        match = expression.search(head.decode(errors="replace"))
        if match is None:
            return None
        text = match[0] if has_year else f"{NO_YEAR} {match[0]}"
        at = datetime.strptime(text, whole)  # noqa: DTZ007 - the zone follows
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

    return find, 0.0 if has_year else YEAR_SECONDS if has_day else DAY_SECONDS


def _at(year: int, month: int, day: int, clock: tuple[bytes, ...]) -> float:
    """Return seconds since the epoch. `clock` is hours, minutes, seconds, fraction."""
    hours, minutes, seconds = (int(part) for part in clock[:3])
    if not (0 < month <= 12 and 0 < day <= 31 and hours < 24 and minutes < 60 and seconds < 61):
        raise ValueError("no time")
    whole = timegm((year, month, day, hours, minutes, seconds))
    return whole + (float(b"." + clock[3]) if clock[3] else 0.0)


def _iso(head: bytes) -> float | None:
    match = ISO.search(head)
    if match is None:
        return None
    year, month, day, *clock, zone = match.groups()
    at = _at(int(year), int(month), int(day), tuple(clock))
    if zone is None or zone == b"Z":
        return at
    offset = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
    return at - offset if zone[:1] == b"+" else at + offset


def _syslog(head: bytes) -> float | None:
    match = SYSLOG.search(head)
    if match is None:
        return None
    month, day, *clock, year = match.groups()
    return _at(int(year or NO_YEAR), MONTHS.index(month) + 1, int(day), tuple(clock))


def _glog(head: bytes) -> float | None:
    match = GLOG.search(head)
    if match is None:
        return None
    month, day, *clock = match.groups()
    return _at(NO_YEAR, int(month), int(day), tuple(clock))


def _epoch(head: bytes) -> float | None:
    match = EPOCH.search(head)
    if match is None:
        return None
    milliseconds, seconds, fraction = match.groups()
    if milliseconds:
        return int(milliseconds) / 1000
    return int(seconds) + (float(b"." + fraction) if fraction else 0.0)
