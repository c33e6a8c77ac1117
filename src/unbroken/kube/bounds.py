"""Bounds of the objects of a kind without a fixed shape, and cutting of JSON that is nested too
deeply for a recursive decoder, without recursion. Pure.

The operator reads no object beyond the bounds, and its webhook admits none.
"""

from __future__ import annotations

import re

OBJECT_BYTES_MAX = 1 << 20
"""Bytes of an object of a kind without a fixed shape: etcd takes 1.5 MiB, and decoded it takes
about ten times that."""

COMMAS_MAX = 64 * 1024
"""Commas of such an object: they bound the values, whose decoding takes about 30 ms then."""

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


def excess(content: bytes) -> str:
    """Return the bound that an object exceeds; empty: none."""
    if len(content) > OBJECT_BYTES_MAX:
        return f"has more than {OBJECT_BYTES_MAX} bytes"
    if content.count(b",") > COMMAS_MAX:
        return f"has more than {COMMAS_MAX} commas"
    if is_too_deep(content):
        return f"is nested more than {DEPTH_MAX} levels deep"
    return ""


def is_too_deep(text: bytes) -> bool:
    """True for an object of more than DEPTH_MAX levels."""
    if text.count(b"{") + text.count(b"[") <= DEPTH_MAX:
        return False
    return bool(cut(text, DEPTH_MAX)[1])
