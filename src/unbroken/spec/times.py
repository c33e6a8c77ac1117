"""Times as Kubernetes writes them (RFC 3339, UTC) and as values (seconds since the epoch)."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float, *, has_microseconds: bool = False) -> str:
    """Return the text of a time: whole seconds as metav1.Time, or microseconds as
    metav1.MicroTime."""
    at = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return at.isoformat(timespec="microseconds" if has_microseconds else "seconds") + "Z"


def time_seconds(text: str) -> float:
    """Return seconds since the epoch. Raises ValueError if `text` is no RFC 3339 time with a
    zone."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None or "T" not in text:
        raise ValueError("no RFC 3339 time with a zone")
    return at.timestamp()
