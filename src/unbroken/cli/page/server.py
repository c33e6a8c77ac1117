"""HTTP server of the live page: its files, snapshots of its contents, and one stream of them.

`entrance` decides whose requests are served. Everything is read with GET. The only other request is
an order, by POST (`orders`): it comes from a page of this origin, as JSON of bounded size.

A stream sends the contents of one page whenever they have changed. They are whole, so a browser
that was cut off needs nothing but the next ones. All viewers of a page share one computation and
one compression.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from unbroken.errors import SpecError, UnbrokenError
from unbroken.kube.errors import Forbidden
from unbroken.listener import admitted
from unbroken.log_lines import Log

from .entrance import Entrance, Source, forged
from .logs import read_query
from .orders import ORDER_BYTES_MAX, read_order
from .turns import Clock, Turns

log = Log(__name__)

HEALTH_PATH = "/healthz"
LEAST_SECONDS = 1.0
"""Seconds between computations of a page's contents."""
AWAY = 503
"""Status of a page whose cluster has not answered."""
AWAY_SECONDS = 2.0
"""Seconds until such a page is computed again: its computation was a wait for the cluster."""
SILENCE_SECONDS = 15.0
"""Seconds without a change after which a stream sends a comment: proxies end silent connections."""
SILENCE = b": no change\n\n"
PACKED_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""Beginning of a stream in gzip (RFC 1952, 2.3), without a name or a time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a server: those of a page for one person, unless another number is given."""

    streams: int = 48
    """Streams at once; the other connections of the server are for files and snapshots."""
    streams_each: int = 48
    """Streams at once of people with the same source."""
    pages: int = 64
    """Pages whose contents are kept for their viewers."""
    kept_seconds: float = float("inf")
    """Seconds after which contents are computed again, however long that takes."""


ONE_PERSON = Bounds()
SEARCHES_MAX, SEARCHES_EACH = 8, 4
"""Readings of logs at once, and those of people with the same source: each may take seconds."""
TEXT_MAX = 300
"""Characters of an error that an answer repeats."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
KEEP = "private, max-age=31536000, immutable"
"""Caching of built files, whose names change with their contents."""
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SOURCE = web.RequestKey("source", Source)
"""The reads and actions of the sender of a request."""


@dataclass(slots=True)
class _Contents:
    """The newest contents of a page."""

    source: Source
    path: tuple[str, ...]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    until: float = float("-inf")
    """Time of the monotonic clock from which they are computed again."""
    latest: float = float("inf")
    """Time of the monotonic clock at which they are, whatever that costs."""
    followers: int = 0
    """Streams of the page, which have it computed again and again."""
    body: bytes = b""
    status: int = 200
    name: str = ""
    """Name of these contents; empty: none were computed yet."""
    packed: bytes = b""
    """Their event as compressed for a stream; empty: not yet."""

    def event(self) -> bytes:
        """Return the event with these contents."""
        kind = "contents" if self.status == 200 else "problem"
        # A line break would end the event; JSON has none outside of strings.
        return f"id: {self.name}\nevent: {kind}\ndata: ".encode() + self.body + b"\n\n"

    def packed_event(self) -> bytes:
        """Return the event, compressed once for all streams."""
        if not self.packed:
            self.packed = packed(self.event())
        return self.packed


def packed(text: bytes) -> bytes:
    """Compress a piece of a stream in gzip, so that it can follow any other piece."""
    packer = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)


class PageServer:
    """Answers the requests of browsers."""

    def __init__(
        self, entrance: Entrance, clock: Clock, turns: Turns, bounds: Bounds = ONE_PERSON
    ) -> None:
        """`turns`: of all work for the page."""
        self._entrance = entrance
        self._clock = clock
        self._turns = turns
        self._bounds = bounds
        self._contents: dict[tuple[Source, tuple[str, ...]], _Contents] = {}
        self._streams = Counter[Source]()
        self._searches = Counter[Source]()
        self._files = built_files()

    def application(self) -> web.Application:
        """Make the application of aiohttp."""
        app = web.Application(middlewares=[self._guard], client_max_size=ORDER_BYTES_MAX)
        app.router.add_get("/api/page/{path:.*}", self._snapshot)
        # aiohttp would send the stream after the head. A proxy could take that for its next answer.
        app.router.add_get("/api/stream/{path:.*}", self._stream, allow_head=False)
        app.router.add_get(
            "/api/text/jobs/{namespace}/{name}/incidents/{number:[0-9]{1,9}}", self._text
        )
        app.router.add_get("/api/logs/{namespace}/{name}", self._logs)
        app.router.add_post("/api/orders", self._order)
        app.router.add_get("/assets/{name}", self._asset)
        app.router.add_get("/{path:.*}", self._index)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without access, and add the headers to every answer."""
        try:
            answer = await self._early_answer(request) or await handler(request)
        except web.HTTPException as error:
            answer = _problem(error.status, error.reason)
        except UnbrokenError as error:
            answer = _problem(_status(error), str(error))
        if not answer.prepared:
            for name, value in HEADERS.items():
                answer.headers.setdefault(name, value)
        return answer

    async def _early_answer(self, request: web.Request) -> web.StreamResponse | None:
        """The answer that refuses a request or gives access; None if the request may be served."""
        if request.path == HEALTH_PATH:
            return web.Response(text="ok\n")  # for a kubelet, which asks by the pod's address
        host = request.headers.get("Host", "")
        if not self._entrance.is_own_host(host):
            return _problem(421, f"this server is not {host[:TEXT_MAX]}")
        if request.path.startswith("/assets/"):
            return None  # as public as the package they are in
        if request.headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site") and (
            request.path.startswith("/api/")
        ):
            return _problem(403, "a page of another site may not read this one")
        entered = await self._entrance.enter(request)
        if entered is not None:
            return entered
        source = await self._entrance.source(request)
        if source is None:
            if request.path.startswith("/api/"):
                return _problem(401, self._entrance.unknown)
            return self._entrance.locked(request)
        request[SOURCE] = source
        admitted(request)
        return None

    async def _index(self, request: web.Request) -> web.Response:
        """Send the page, whose script reads the address."""
        body = self._files["index.html"]
        if person := self._entrance.person(request):
            named = f'<div id="page" data-person="{html.escape(person)}">'
            body = body.replace(b'<div id="page">', named.encode())
        return web.Response(body=body, content_type="text/html")

    async def _order(self, request: web.Request) -> web.Response:
        """Carry out an order."""
        if problem := forged(request) or self._entrance.refusal_to_act(request):
            return _problem(403, problem)
        if request.content_type != "application/json":
            return _problem(415, "an order must be JSON")
        try:
            order = read_order(await request.read())
        except SpecError as error:
            return _problem(400, str(error))
        try:
            result = await request[SOURCE].act(order)
        except SpecError as error:
            return _problem(409, str(error))
        return web.json_response({"result": result})

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        body = self._files.get(f"assets/{name}")
        suffix = name[name.rfind(".") :]
        if body is None or suffix not in TYPES:
            return _problem(404, "no such file")
        return web.Response(body=body, content_type=TYPES[suffix], headers={"Cache-Control": KEEP})

    async def _snapshot(self, request: web.Request) -> web.Response:
        found = await self._current(request[SOURCE], _path(request))
        return web.Response(status=found.status, body=found.body, content_type="application/json")

    async def _text(self, request: web.Request) -> web.Response:
        place = request.match_info
        number = int(place["number"])
        text = await request[SOURCE].text(place["namespace"], place["name"], number)
        answer = web.Response(text=text)
        # The names of a job that exists need no quoting.
        file = f"{place['namespace']}-{place['name']}-incident-{number}.txt"
        answer.headers["Content-Disposition"] = f'attachment; filename="{file}"'
        return answer

    async def _logs(self, request: web.Request) -> web.Response:
        place, query, source = request.match_info, read_query(request.query), request[SOURCE]
        is_busy = self._searches[source] >= SEARCHES_EACH or self._searches.total() >= SEARCHES_MAX
        if is_busy:
            return _problem(503, "too many searches of logs are under way: try again soon")
        self._searches[source] += 1
        try:
            value = await source.logs(place["namespace"], place["name"], query)
        finally:
            self._searches[source] -= 1
            self._searches += Counter()  # forgets those at 0
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        source, bounds = request[SOURCE], self._bounds
        for count, most in (
            (self._streams[source], bounds.streams_each),
            (self._streams.total(), bounds.streams),
        ):
            if count >= most:
                return _problem(503, f"{count} streams are open: close a page")
        self._streams[source] += 1
        try:
            return await self._send(request, _path(request))
        finally:
            self._streams[source] -= 1
            self._streams += Counter()  # forgets those at 0

    async def _send(self, request: web.Request, path: tuple[str, ...]) -> web.StreamResponse:
        headers = {**HEADERS, "Content-Type": "text/event-stream"}
        is_packed = "gzip" in request.headers.get("Accept-Encoding", "")
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        if is_packed:
            await answer.write(PACKED_HEAD)
        found = await self._current(request[SOURCE], path)
        found.followers += 1
        try:
            await self._follow(request, answer, found)
        finally:
            found.followers -= 1
        return answer

    async def _follow(
        self, request: web.Request, answer: web.StreamResponse, found: _Contents
    ) -> None:
        """Send contents that have changed, for as long as the viewer has access."""
        is_packed = "Content-Encoding" in answer.headers
        silence = packed(SILENCE) if is_packed else SILENCE
        sent, quiet = request.headers.get("Last-Event-ID", ""), 0.0
        # Access may end while a stream is open: then the stream ends, too.
        while await self._entrance.source(request) == request[SOURCE]:
            if found.name != sent:
                await answer.write(found.packed_event() if is_packed else found.event())
                sent, quiet = found.name, 0.0
            elif quiet >= SILENCE_SECONDS:
                await answer.write(silence)
                quiet = 0.0
            wait = max(found.until - self._clock.monotonic(), LEAST_SECONDS)
            await self._clock.pause(wait)
            quiet += wait
            async with found.lock:
                if self._clock.monotonic() >= found.until:
                    async with self._turns.turn(found.latest):
                        await self._compute(found)

    async def _current(self, source: Source, path: tuple[str, ...]) -> _Contents:
        """The contents of a page: as new as its viewers have them, or computed now."""
        key = (source, path)
        found = self._contents.pop(key, None) or _Contents(source, path)
        self._contents[key] = found
        if len(self._contents) > self._bounds.pages:
            del self._contents[next(iter(self._contents))]
        if found.followers and found.name:
            return found
        async with found.lock:
            if self._clock.monotonic() >= found.until:
                with self._turns.at_once():
                    await self._compute(found)
        return found

    async def _compute(self, found: _Contents) -> None:
        found.status, value = await _read(found.source, found.path)
        found.body, found.packed = msgspec.json.encode(value), b""
        found.name = hashlib.sha256(found.body).hexdigest()[:16]
        now = self._clock.monotonic()
        found.until = now + (AWAY_SECONDS if found.status == AWAY else LEAST_SECONDS)
        found.latest = now + self._bounds.kept_seconds


async def _read(source: Source, path: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    try:
        return 200, await source.read(path)
    except UnbrokenError as error:
        return _status(error), {"problem": str(error)[:TEXT_MAX]}
    except Exception as error:  # noqa: BLE001 -- one object that cannot be shown ends no stream
        log.error("page not computed", path="/".join(path), error=repr(error))
        return 500, {"problem": "this page could not be computed; see the log of its server"}


def _status(error: UnbrokenError) -> int:
    """The HTTP status for an error that the reader of a page may see."""
    if isinstance(error, SpecError):
        return 404
    return 403 if isinstance(error, Forbidden) else AWAY


def _path(request: web.Request) -> tuple[str, ...]:
    return tuple(request.match_info["path"].split("/"))


def _problem(status: int, text: str) -> web.Response:
    return web.json_response({"problem": text[:TEXT_MAX]}, status=status)


def built_files() -> Mapping[str, bytes]:
    """The built page, by path below its folder."""
    folder = files("unbroken.cli.page") / "built"
    assets = folder / "assets"
    found = {f"assets/{one.name}": one.read_bytes() for one in assets.iterdir()}
    return {"index.html": (folder / "index.html").read_bytes(), **found}
