"""A pod that redirects its clients to another server, which must receive no request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from zlib import compress

from aiohttp import web

from tests import loopback

BOMB = compress(bytes(64 << 20))
"""64 KiB that decompress to 64 MiB."""


@dataclass
class Redirecting:
    """Answers requests below `paths` with the redirect `status`, and others as a pod does."""

    status: int = 302
    paths: tuple[str, ...] = ("",)
    """Prefixes of paths that redirect."""
    asked: list[str] = field(default_factory=list)
    """Requests to the pod itself."""
    heard: list[str] = field(default_factory=list)
    """Requests to the other server: there must be none."""
    port: int = 0
    target: int = 0

    async def pod(self, request: web.Request) -> web.StreamResponse:
        """Answer as the pod."""
        self.asked.append(f"{request.method} {request.path}")
        if request.path.startswith(self.paths):
            place = f"http://127.0.0.1:{self.target}/latest/meta-data/"
            return web.Response(status=self.status, headers={"Location": place})
        if request.path == "/bomb":
            return web.Response(body=BOMB, headers={"Content-Encoding": "deflate"})
        if request.path == "/status":
            return web.json_response({"status": "ready"})
        raise web.HTTPNotFound

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Answer as another server, which needs no credentials."""
        self.heard.append(f"{request.method} {request.path}")
        return web.json_response({"status": "ready"})


@asynccontextmanager
async def redirecting(pod: Redirecting) -> AsyncIterator[Redirecting]:
    """Serve both during the block."""
    async with AsyncExitStack() as stack:
        for handler in (pod.elsewhere, pod.pod):
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", handler)
            port = await stack.enter_async_context(loopback.serving(application))
            pod.target, pod.port = pod.port, port
        yield pod
