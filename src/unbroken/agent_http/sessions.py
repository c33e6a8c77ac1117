"""HTTP client sessions that ask the address they are given, and nothing else.

Every client of the project has its session from here, but for the Kubernetes API's
(`kube/transport`), which keeps the same rules.  A server may be a stranger's: it must not be able
to send this program anywhere else, nor fill its memory with few bytes.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import aiohttp
from aiohttp import hdrs

from unbroken.errors import PeerError


def plain_session(
    timeout: aiohttp.ClientTimeout | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> aiohttp.ClientSession:
    """Make a session that refuses redirects and compressed answers (PeerError).

    It keeps no cookies and asks no proxy of the environment. Connections are not limited. `tls`
    says which certificates are trusted; None trusts those of the system.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls or True),
        timeout=timeout or aiohttp.ClientTimeout(total=300.0),
        headers={hdrs.ACCEPT_ENCODING: "identity", **(headers or {})},
        middlewares=(_only_its_own_answer,),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


async def _only_its_own_answer(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    answer = await handler(request)
    refused = ""
    if 300 <= answer.status < 400:
        refused = f"a redirect (HTTP {answer.status}), which is not followed"
    elif answer.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        refused = "compressed content, which was not asked for"
    if refused:
        answer.close()
        raise PeerError(f"{request.url.host} answers {request.url.path} with {refused}")
    return answer
