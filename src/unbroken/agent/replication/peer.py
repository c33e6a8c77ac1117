"""Where another agent has copies of snapshots."""

from __future__ import annotations

from urllib.parse import quote

from unbroken.agent_http.snapshots import PATH, Key, Point


def name_path(name: str) -> str:
    """Of all that has a name."""
    return f"{PATH}/{quote(name, safe='')}"


def path(key: Key, point: Point | None = None) -> str:
    """Of a rank's copies, or of one."""
    found = f"{name_path(key[0])}/{key[1]}"
    return found if point is None else f"{found}/{point[0]}/{point[1]}"
