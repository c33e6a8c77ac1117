"""Files of a node as text."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """All of it; empty: it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
