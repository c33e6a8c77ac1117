"""HTTP server of a registry of metrics for Prometheus, and of a liveness probe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from unbroken.errors import WorldError
from unbroken.listener import Limits, bound, serving

PATH = "/metrics"
HEALTH_PATH = "/healthz"
"""Path that is answered while the program's event loop runs, for the probes of a kubelet."""
PORT = 8081
"""Port of the training operator's metrics, as documented."""
LIMITS = Limits(64)
"""Limits of connections: a few scrapers and the kubelet. The program needs its other
descriptors."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    refresh: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[str]:
    """Serve for the time of the block; yield the address. `port` 0: any. Raises WorldError.

    `refresh` is called before each answer, and reads what the collectors show.
    """
    app = web.Application(middlewares=[_close_after])
    app.router.add_get(PATH, _handler(registry, refresh))
    app.router.add_get(HEALTH_PATH, _healthy)
    try:
        sockets = await bound(host, port)
    except OSError as error:
        text = f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port"
        raise WorldError(text) from error
    actual = sockets[0].getsockname()[1]
    async with serving(app, sockets, LIMITS):
        yield f"http://{host}:{actual}{PATH}"


@web.middleware
async def _close_after(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close the connection after its answer: every client is untrusted here."""
    response = await handler(request)
    response.force_close()
    return response


async def _healthy(_: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


def _handler(registry: CollectorRegistry, refresh: Callable[[], Awaitable[None]] | None) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if refresh is not None:
            await refresh()
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return answer


def _encoder(accepted: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the form that a client accepts, and its name; the plain one for an invalid version."""
    try:
        encode, content_type = choose_encoder(accepted)
    except (TypeError, ValueError):
        # prometheus_client 0.26 compares the parts of a version as text.
        return choose_encoder("")
    return (encode, content_type) if content_type.isprintable() else choose_encoder("")
