"""Bounds on what the other side of a connection may send: texts, numbers, nested values.

Texts lose NUL and lone surrogates, which neither the Kubernetes API nor UTF-8 can store.
"""

from __future__ import annotations

import json

NUMBER_MAX = 2**53
"""Largest integer that every JSON reader represents exactly."""
TEXT_MAX = 4096
"""Characters of a text; a longer one is cut or refused.  Agents cut theirs here or earlier."""
PROGRESS_BYTES_MAX, PROGRESS_DEPTH_MAX = 64 * 1024, 4
"""`progress`, the checkpoints of a node: bytes as JSON, and objects inside each other (HyperPod's
agent has 2)."""
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def clean(text: str, longest: int = TEXT_MAX) -> str:
    """Return the beginning of a text, with `?` for lone surrogates and without NUL."""
    text = text[:longest]
    if not text.isascii():
        text = text.encode(errors="replace").decode()
    return text.replace("\0", "") if "\0" in text else text


def is_clean(text: str) -> bool:
    """True if `clean` would leave a text of any length unchanged."""
    return clean(text, len(text)) == text


def is_small(value: object, bytes_max: int, depth_max: int) -> bool:
    """True if a decoded JSON value is within these bounds of depth and length as JSON."""
    values, count = [value], 0
    for _ in range(depth_max + 1):
        outer = [one for one in values if isinstance(one, dict | list)]
        if not outer:
            return len(_ENCODE(value)) <= bytes_max
        values = [
            inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)
        ]
        count += len(values)
        if count > bytes_max:  # each takes at least one byte
            return False
    return False
