"""Reasons why an agent cannot be reached, in plain words."""

from __future__ import annotations

import os

import aiohttp

from unbroken.errors import PeerError

NO_LINK = (403, 404)
"""Status codes for a link request to an agent without links.

A stock agent answers 404, or 403 if its server (uvicorn) finds a library for WebSockets.
"""


def refusal_text(status: int) -> str:
    """Explain an agent that answers a link with this status."""
    if status == 401:
        return f"does not know the key of its job (HTTP {status})"
    return f"refused the link with HTTP {status}"


def text_of(error: Exception, seconds: float) -> str:
    """Explain an error of an agent in plain words; `seconds`: its timeout."""
    match error:
        case PeerError():
            return f"broke the protocol: {error}"
        case TimeoutError():
            return f"did not answer within {seconds:g} s"
        case aiohttp.ClientConnectorError():
            return text_of(error.os_error, seconds)
        case ConnectionRefusedError():
            return "refused the connection"
        case ConnectionError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "closed the connection"
        case OSError() if error.errno:
            return f"cannot be reached: {os.strerror(error.errno)}"
        case _:
            return f"cannot be talked to: {str(error)[:200] or type(error).__name__}"
