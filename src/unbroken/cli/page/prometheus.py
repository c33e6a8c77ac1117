"""Queries of the live page to a Prometheus that the person has named.

The answers are untrusted: their size and time are bounded, and what does not have the form of
Prometheus' HTTP API is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import PeerError, SpecError, WorldError

ADDRESS_MAX = 2048
"""Characters of the address."""
QUERY_SECONDS = 10.0
"""Seconds that a query may take."""
BYTES_MAX = 4 * 1024 * 1024
"""Bytes of an answer: 1,000 series of 120 points have about 3 MB."""
ERROR_MAX = 200
"""Characters of an error that are shown."""


class PrometheusSeries(msgspec.Struct):
    """One series of an answer."""

    metric: dict[str, str]
    """Labels."""
    values: list[tuple[float, str]] = []
    """Times in seconds since the epoch, and values as text; of a query over a span."""
    value: tuple[float, str] | None = None
    """The same of a query at one time."""


class _Data(msgspec.Struct):
    result: list[PrometheusSeries]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    """The HTTP API of a Prometheus; make it within an event loop."""

    address: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, query: Mapping[str, str]) -> list[PrometheusSeries]:
        """Return the series of a query.

        Raises WorldError if nothing answers, and PeerError if this query has no result: Prometheus
        refuses it, it takes too long, or the answer has another form or is too long.
        """
        given = {**query, "timeout": f"{QUERY_SECONDS:g}s"}
        try:
            async with self.session.post(f"{self.address}/api/v1/{path}", data=given) as answer:
                status = answer.status
                body = await _body(answer)
        except TimeoutError as error:
            raise PeerError(f"Prometheus gave no answer within {QUERY_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error)[:ERROR_MAX]
            raise WorldError(f"cannot ask Prometheus at {self.address}: {reason}", 0) from error
        try:
            found = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            text = f"Prometheus at {self.address} answered HTTP {status} in another form: {error}"
            raise PeerError(text[:ERROR_MAX]) from error
        if found.status != "success" or found.data is None:
            raise PeerError(f"Prometheus refuses the query: {found.error[:ERROR_MAX]}")
        return found.data.result


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    while piece := await answer.content.read(BYTES_MAX + 1 - len(found)):
        found += piece
        if len(found) > BYTES_MAX:
            raise PeerError(f"the answer of Prometheus has more than {BYTES_MAX // 2**20} MiB")
    return bytes(found)


def prometheus_session() -> aiohttp.ClientSession:
    """Make a session for queries; it follows no redirect."""
    return plain_session(aiohttp.ClientTimeout(total=QUERY_SECONDS))


def read_prometheus_address(text: str) -> str:
    """Return the address of a Prometheus without a slash at its end; SpecError."""
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or len(text) > ADDRESS_MAX or len(text.split()) != 1:
        raise SpecError(
            f"--prometheus: {text[:ERROR_MAX]!r} must be an address like http://127.0.0.1:9090"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SpecError(
            "--prometheus: the address must have no user, password or query: other users of this "
            "machine can read arguments. Forward a port to a Prometheus that needs them"
        )
    return text.rstrip("/")
