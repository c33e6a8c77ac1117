"""What the workers of other agents import, asked of these."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import aiohttp

from unbroken.errors import PeerError
from unbroken.wire.agent import IMPORTS_PATH
from unbroken.wire.agent_codec import decode_imports
from unbroken.wire.json_fields import FRAME_BYTES_MAX

logger = logging.getLogger(__name__)

FETCH_SECONDS = 5.0
"""Of one agent."""


async def fetch(addresses: Sequence[str], token: str | None) -> tuple[str, ...]:
    """The list of the first agent that has one; empty: none has."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(FETCH_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        for address in addresses:
            try:
                names = await _ask(session, address)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, PeerError) as error:
                # ValueError: the address is none.
                reason = str(error) or f"no answer in {FETCH_SECONDS:g} s"
                logger.info("agent=%s does not tell what to import reason=%r", address, reason)
                continue
            if names:
                return names
    return ()


async def _ask(session: aiohttp.ClientSession, address: str) -> tuple[str, ...]:
    async with session.get(f"http://{address}{IMPORTS_PATH}") as answer:
        if answer.status != 200:
            raise PeerError(f"HTTP {answer.status}")
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > FRAME_BYTES_MAX:
                raise PeerError(f"more than {FRAME_BYTES_MAX} bytes")
        return decode_imports(bytes(body))
