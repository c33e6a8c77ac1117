"""Paths of copies of snapshots at another agent."""

from __future__ import annotations

from urllib.parse import quote

from unbroken.agent_http.snapshots import PATH, Key, Point


def name_path(name: str) -> str:
    """Return the path of everything under a name."""
    return f"{PATH}/{quote(name, safe='')}"


def path(key: Key, point: Point | None = None) -> str:
    """Return the path of a rank's copies, or of one copy."""
    result = f"{name_path(key[0])}/{key[1]}"
    return result if point is None else f"{result}/{point[0]}/{point[1]}"
