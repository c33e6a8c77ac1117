"""Whose requests the page's server serves: the one interface for links, accounts and proxies.

An `Entrance` says who sends a request, by the `Source` of all that this person may read and do.
`LinkEntrance` is that of a local cluster and of `unbroken ui`: one person, and a browser that has
opened a link.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web

from .access import COOKIE_SECONDS, KEY_BYTES, Access
from .logs import LogQuery
from .orders import Order

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in a Host header. The port may differ, because a tunnel changes it. Another
name belongs to a site whose name was resolved to this machine (DNS rebinding)."""
KEY_HEADER = "X-Unbroken-Key"
"""Header with the key of a browser's page. A page of another site cannot send it (CORS)."""
LOCKED = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>unbroken: locked</title>
<h1>This page needs a link</h1>
<p>A link opens it once, for ten minutes after it was made. Then this browser can look for 30 days.
To get a link, run <code>unbroken ui</code> as the user who serves the page.</p>
</html>
"""


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()


def forged(request: web.Request) -> str:
    """Why a request may come from a page of another origin; empty: it does not.

    Browsers send `Origin` with every POST, and new ones `Sec-Fetch-Site`.
    """
    origin = request.headers.get("Origin", "")
    is_own = origin and _place(origin) == request.headers.get("Host", "").lower()
    if is_own and request.headers.get("Sec-Fetch-Site", "same-origin") == "same-origin":
        return ""
    return "an order must come from a page of this server"


def _place(origin: str) -> str:
    """Host and port of an origin; empty: it is none."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return ""
    return found.netloc.lower() if found.scheme in ("http", "https") else ""


Read = Callable[[tuple[str, ...]], Awaitable[dict[str, Any]]]
"""Computes the contents of a page from the parts of its path; SpecError: there is no such page."""


@dataclass(frozen=True, slots=True)
class Source:
    """The reads and actions of a person. People with the same source share computed contents."""

    read: Read
    text: Callable[[str, str, int], Awaitable[str]]
    """The story of an incident, by namespace and name of its job and its number."""
    logs: Callable[[str, str, LogQuery], Awaitable[dict[str, Any]]]
    """Lines of the logs of a job, by its namespace and name."""
    act: Callable[[Order], Awaitable[str]]
    """Carries out an order with the person's rights, and returns the result in a sentence."""


class Entrance(Protocol):
    """Decides who sends a request."""

    unknown: str
    """A sentence for people who are not known."""

    def locked(self, request: web.Request) -> web.Response:
        """A page in HTML for people who are not known."""
        ...

    def person(self, request: web.Request) -> str:
        """The name of the signed-in person; empty: people do not sign in here."""
        ...

    def is_own_host(self, host: str) -> bool:
        """True if a Host header names this server."""
        ...

    async def enter(self, request: web.Request) -> web.StreamResponse | None:
        """Answer a request that asks for access, such as that of a link; None: it is another."""
        ...

    async def source(self, request: web.Request) -> Source | None:
        """The reads and actions of the sender of a request; None: the sender is not known."""
        ...

    def refusal_to_act(self, request: web.Request) -> str:
        """Why the known sender of an order may not give one from this browser; empty: may.

        The server has checked that the order comes from a page of its own origin.
        """
        ...


class LinkEntrance:
    """One person, whose browsers have opened a link.

    A cookie lets a browser read. It is no proof for an order: browsers send it to every port of
    this machine, where another user may listen. An order also needs the key that the link's answer
    has put into the page's own storage, which a browser keeps for each port. The key ends with the
    server, because another user may listen at its port afterwards.
    """

    unknown = "this browser has no access: run `unbroken ui` for a link"

    def __init__(
        self, source: Source, access: Access, wall: Callable[[], float], cookie_name: str
    ) -> None:
        """`cookie_name`: a name of this port alone, because browsers share cookies between ports of
        a host."""
        self._source = source
        self._access = access
        self._wall = wall
        self._cookie_name = cookie_name
        self._since = wall()
        self._key = secrets.token_hex(KEY_BYTES)

    def is_own_host(self, host: str) -> bool:
        """True for the loopback address by any of its names."""
        return host_name(host) in HOSTS

    def locked(self, request: web.Request) -> web.Response:
        """Say how to get a link."""
        return web.Response(status=401, text=LOCKED, content_type="text/html")

    def person(self, request: web.Request) -> str:
        """None: a link is for one person, who needs no name."""
        return ""

    async def enter(self, request: web.Request) -> web.StreamResponse | None:
        """Exchange a link for a cookie and the key of orders."""
        if request.path != "/" or "link" not in request.query:
            return None
        now = self._wall()
        if not self._access.use_link(request.query["link"], now, self._since):
            if self._has_cookie(request):
                return web.Response(status=303, headers={"Location": "/"})
            return self.locked(request)
        # A fragment is sent to no server; the page takes it out of the address.
        answer = web.Response(status=303, headers={"Location": f"/#key={self._key}"})
        answer.set_cookie(
            self._cookie_name,
            self._access.cookie(now),
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite="Lax",  # a link in a chat must find the cookie, which lets nobody act
        )
        return answer

    async def source(self, request: web.Request) -> Source | None:
        """The source of the one person; None for a browser without a cookie."""
        return self._source if self._has_cookie(request) else None

    def refusal_to_act(self, request: web.Request) -> str:
        """Refuse a browser that does not send the key."""
        given = request.headers.get(KEY_HEADER, "")
        if hmac.compare_digest(given.encode(errors="replace"), self._key.encode()):
            return ""
        return (
            "this browser may only look, because it opened no link since the page's server "
            "started: run `unbroken ui` and open its link"
        )

    def _has_cookie(self, request: web.Request) -> bool:
        value = request.cookies.get(self._cookie_name, "")
        return self._access.is_cookie(value, self._wall())
