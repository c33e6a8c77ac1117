"""Cutting of JSON that is nested too deeply for a recursive decoder, without recursion. Pure."""

from __future__ import annotations

import re

DEPTH_MAX = 64
"""Levels of an object of a kind without a fixed shape.

A pod template has about 15; kube-apiserver takes 10,000, and Python's own functions (copy,
comparison, encoding) fail from about 300 on.
"""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def cut(text: bytes, depth: int) -> tuple[bytes, list[bytes]]:
    """Return the text with each object or list below `depth` levels replaced by its number, and
    these.

    It takes time linear in the text. The result for text that is not JSON is not JSON either.
    """
    kept: list[bytes] = []
    pieces: list[bytes] = []
    level = start = copied = 0
    for token in _TOKEN.finditer(text):
        char = text[token.start()]
        if char in b"[{":
            level += 1
            if level == depth + 1:
                start = token.start()
        elif char in b"]}":
            if level == depth + 1:
                kept += [text[copied:start], b"%d" % len(pieces)]
                pieces.append(text[start : token.end()])
                copied = token.end()
            level -= 1
    return b"".join([*kept, text[copied:]]), pieces


def is_too_deep(text: bytes) -> bool:
    """True for an object of more than DEPTH_MAX levels."""
    if text.count(b"{") + text.count(b"[") <= DEPTH_MAX:
        return False
    return bool(cut(text, DEPTH_MAX)[1])
