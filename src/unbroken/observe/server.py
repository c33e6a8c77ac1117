"""Serves a registry of metrics over HTTP for Prometheus, and says that the program lives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from unbroken.errors import WorldError

PATH = "/metrics"
HEALTH_PATH = "/healthz"
"""Answered while the program's event loop turns, for the probes of a kubelet."""
PORT = 8081
"""Of the training operator's metrics, as documented."""


@asynccontextmanager
async def serving_metrics(registry: CollectorRegistry, host: str, port: int) -> AsyncIterator[str]:
    """Serve for the time of the block; gives the address.  `port` 0: any.  WorldError."""
    app = web.Application()
    app.router.add_get(PATH, _handler(registry))
    app.router.add_get(HEALTH_PATH, _healthy)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            text = f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another port"
            raise WorldError(text) from error
        bound = runner.addresses[0][1]
        yield f"http://{host}:{bound}{PATH}"
    finally:
        await runner.cleanup()


async def _healthy(_: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


def _handler(
    registry: CollectorRegistry,
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return answer
