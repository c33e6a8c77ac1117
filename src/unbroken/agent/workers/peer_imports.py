"""Requests to other agents for the modules that their workers import."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from unbroken.agent_http.peer import connected
from unbroken.errors import PeerError
from unbroken.log_lines import Log
from unbroken.wire.agent import IMPORTS_PATH
from unbroken.wire.agent_codec import decode_imports
from unbroken.wire.codec import FRAME_BYTES_MAX

log = Log(__name__)

FETCH_SECONDS = 5.0
"""Timeout of the request to one agent."""


async def fetch(addresses: Sequence[str], key: bytes | None) -> tuple[str, ...]:
    """Return the list of the first agent that has one; empty: none has."""
    for address in addresses:
        try:
            names = await _ask(address, key)
        except (OSError, TimeoutError, ValueError, PeerError) as error:
            reason = str(error) or f"no answer in {FETCH_SECONDS:g} s"
            log.info("imports of a peer are unknown", agent=address, error=reason)
            continue
        if names:
            return names
    return ()


async def _ask(address: str, key: bytes | None) -> tuple[str, ...]:
    async with asyncio.timeout(FETCH_SECONDS), connected(address, key) as peer:
        await peer.ask("GET", IMPORTS_PATH)
        head = await peer.head()
        if head.status != 200:
            raise PeerError(f"HTTP {head.status}")
        return decode_imports(await peer.text(head, FRAME_BYTES_MAX))
