"""Requests to a member of the checkpoint memory: access, and the values that they carry."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from unbroken.core.checkpoint_memory import (
    META_CHARACTERS_MAX,
    SERVICE,
    CheckpointRefusal,
    ShardKey,
    is_namespace,
    key_of,
    wrong_namespace,
)
from unbroken.foreign_numbers import INT64_MAX, no_number, whole_number
from unbroken.listener import admitted
from unbroken.log_lines import Log

from .checkpoint_files import IncomingShard
from .checkpoint_peers import PAUSE_SECONDS, PIECE_BYTES, STAMP_HEADER

log = Log(__name__)

META_HEADER = "Shard-Meta"
CLIENT_SECONDS, CLIENT_BYTES_PER_SECOND = 60.0, 1 << 20
"""Slowest upload of a client, for which memory is reserved; 60 s is its own timeout."""
_LABELS = SERVICE.split(".")
HOSTS = frozenset({"localhost", *(".".join(_LABELS[:count]) for count in (1, 2, 3, len(_LABELS)))})
"""Names by which a client may call a member: that of the Service, as far as a pod shortens it."""


def answered(service: str) -> Middleware:
    """Return the middleware that refuses browsers, and trusts the connections of others.

    `service` is one more name of the members. A full file system is answered as a full memory.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_browsers(request, service)
        admitted(request)
        try:
            return await handler(request)
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            log.warning("checkpoint not kept", path=request.path, error=error)
            raise web.HTTPInsufficientStorage(text=f"the shard cannot be kept: {error}") from error

    return middleware


def _refuse_browsers(request: web.Request, service: str) -> None:
    """Refuse requests of browsers: no client of the protocol is a browser.

    A page of another site would reach a member by a name of its own whose address is a member's.
    """
    for header in ("Origin", "Sec-Fetch-Site"):
        if header in request.headers:
            raise web.HTTPForbidden(text=f"browsers have no access (header {header})")
    host = request.headers.get("Host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    name = name.lower().removesuffix(".")
    if name in HOSTS or name == service.lower().removesuffix("."):
        return
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise web.HTTPMisdirectedRequest(
            text=f"this server has no name {name[:80]!r}: ask it by its IP address or as "
            f"{SERVICE}, or start it with --service NAME"
        ) from None


async def fill(incoming: IncomingShard, request: web.Request) -> None:
    """Receive all bytes of a shard; HTTPBadRequest if they do not come, or not in time."""
    seconds = CLIENT_SECONDS + incoming.shard.size / CLIENT_BYTES_PER_SECOND
    try:
        async with asyncio.timeout(seconds):
            while True:
                async with asyncio.timeout(PAUSE_SECONDS):
                    data = await request.content.read(PIECE_BYTES)
                if not data:
                    break
                incoming.write(data)
    except TimeoutError:
        text = (
            f"{incoming.shard.size} bytes did not come in {seconds:.0f} s, or none for "
            f"{PAUSE_SECONDS:.0f} s"
        )
        raise web.HTTPRequestTimeout(text=text) from None
    if not incoming.is_whole:
        raise web.HTTPBadRequest(text="fewer bytes than announced")


def unless_refused(given: Any) -> Any:
    """Return the value; raise a CheckpointRefusal as the answer of HTTP."""
    if isinstance(given, CheckpointRefusal):
        raise _REFUSALS[given.status](text=given.reason)
    return given


_REFUSALS: dict[int, type[web.HTTPException]] = {
    400: web.HTTPBadRequest,
    409: web.HTTPConflict,
    507: web.HTTPInsufficientStorage,
}


def namespace_of(request: web.Request) -> str:
    """Return the namespace in the path of a request."""
    name = request.match_info["namespace"]
    if not is_namespace(name):
        raise web.HTTPBadRequest(text=wrong_namespace(name))
    return name


def key_in(request: web.Request) -> ShardKey:
    """Return the key in the path of a request."""
    parts = request.match_info
    key: ShardKey = unless_refused(key_of(parts["namespace"], parts["rank"], parts["step"]))
    return key


def stamp_of(request: web.Request) -> int | None:
    """Return the stamp of another member's request; None: it is a client's."""
    text = request.headers.get(STAMP_HEADER)
    if text is None:
        return None
    stamp = whole_number(text)
    if stamp is None:
        raise web.HTTPBadRequest(text=no_number(STAMP_HEADER, text, 0, INT64_MAX))
    return stamp


def number_of(request: web.Request, name: str, default: int | None, most: int) -> int:
    """Return the number from 1 to `most` that a query has; `default` where it has none."""
    text = request.query.get(name, "" if default is None else str(default))
    number = whole_number(text, 1, most)
    if number is None:
        raise web.HTTPBadRequest(text=no_number(name, text, 1, most))
    return number


def meta_of(request: web.Request) -> str:
    """Return the checksum that comes with a shard."""
    meta = request.headers.get(META_HEADER, "")
    if len(meta) > META_CHARACTERS_MAX or not (meta.isascii() and meta.isprintable()):
        raise web.HTTPBadRequest(
            text=f"{META_HEADER}: expected at most {META_CHARACTERS_MAX} printable ASCII characters"
        )
    return meta
