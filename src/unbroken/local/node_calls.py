"""Authorization of the API server's calls to a node without revealing the token. Pure.

A node that is off has left its port, and any local user may listen there. So the API server sends a
MAC of each call instead of the token: it is valid for one request to one address, for seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re

SCHEME = "Unbroken-Node"
VALID_SECONDS = 10
"""Node and API server share one clock."""
INPUT_BYTES = 32 << 20
"""Longest message of input for a command, as in Kubernetes (golang.org/x/net/websocket)."""
HEADER = re.compile(rf"{SCHEME} ([0-9]{{1,12}}):([0-9a-f]{{64}})")


def authorization(token: str, address: str, target: str, now: float) -> str:
    """The Authorization header of a GET.

    `address` is host and port of the node, `target` path and query as they are sent, `now` in
    seconds since the epoch.
    """
    stamp = str(int(now))
    return f"{SCHEME} {stamp}:{_mac(token, address, target, stamp)}"


def is_authorized(header: str, token: str, address: str, target: str, now: float) -> bool:
    """True if a header was made with the token, lately and for this very call."""
    match = HEADER.fullmatch(header)
    if not token or match is None or abs(now - int(match[1])) > VALID_SECONDS:
        return False
    return hmac.compare_digest(match[2], _mac(token, address, target, match[1]))


def _mac(token: str, address: str, target: str, stamp: str) -> str:
    said = "\n".join((stamp, "GET", address, target)).encode(errors="surrogateescape")
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()
