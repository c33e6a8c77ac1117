"""Ages and durations as `kubectl get` shows them."""

from __future__ import annotations

from datetime import datetime

UNKNOWN = "<unknown>"

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def human_duration(seconds: float) -> str:
    """Two units at most, the finer one only while it matters (`duration.HumanDuration`, v1.33)."""
    whole = int(seconds)
    if whole < -1:
        return "<invalid>"
    whole = max(whole, 0)
    steps = (
        # (below, unit, its letter, finer unit, its letter)
        (2 * _MINUTE, 1, "s", 0, ""),
        (10 * _MINUTE, _MINUTE, "m", 1, "s"),
        (3 * _HOUR, _MINUTE, "m", 0, ""),
        (8 * _HOUR, _HOUR, "h", _MINUTE, "m"),
        (2 * _DAY, _HOUR, "h", 0, ""),
        (8 * _DAY, _DAY, "d", _HOUR, "h"),
        (2 * _YEAR, _DAY, "d", 0, ""),
        (8 * _YEAR, _YEAR, "y", _DAY, "d"),
    )
    for below, unit, letter, finer, finer_letter in steps:
        if whole < below:
            rest = whole % unit // finer if finer else 0
            return f"{whole // unit}{letter}" + (f"{rest}{finer_letter}" if rest else "")
    return f"{whole // _YEAR}y"


def seconds_of(timestamp: str | None) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None when there is none that can be read."""
    if not timestamp:
        return None
    try:
        read = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return read.timestamp() if read.tzinfo is not None else None


def age(now: float, timestamp: str | None) -> str:
    """Time since a timestamp."""
    since = seconds_of(timestamp)
    return UNKNOWN if since is None else human_duration(now - since)
