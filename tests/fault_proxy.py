"""A real HTTP proxy between a client and an API server that causes the faults of a test.

Client and server are real, and so are the connections; the proxy changes only the data between
them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import clock_gettime

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tests.apiservers import Cluster
from tests.watching import PATIENCE_SECONDS

CLOCK_BOOTTIME = 7
HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "upgrade"}
READS = ("GET", "HEAD", "OPTIONS")


@dataclass
class Call:
    """A request that came; `at` in seconds since boot, from the only clock of the machine."""

    at: float
    method: str
    path: str
    query: dict[str, str]
    body: bytes
    status: int = 0
    """Status of the server's answer; 0: there was none."""

    @property
    def is_watch(self) -> bool:
        """True if the request asks for events."""
        return "watch" in self.query


Match = Callable[[Call], bool]


@dataclass
class Fault:
    """A change to calls that match, `times` times; None: to each."""

    match: Match
    times: int | None = 1
    status: int = 0
    """Status to answer with, without a request to the server."""
    headers: dict[str, str] = field(default_factory=dict)
    slow_seconds: float = 0.0
    """Seconds to wait before the request to the server."""
    reset_after: int | None = None
    """Bytes of the answer after which the connection breaks."""
    keep_bytes: int | None = None
    """Bytes after which the answer ends, though it is complete by HTTP."""
    is_silent: bool = False
    """True if the connection stays, but nothing comes any more."""


class Broken(Exception):
    """Raised when the connection to the client is to be broken."""


class FaultProxy:
    """A proxy from one client to a server."""

    def __init__(self, cluster: Cluster) -> None:
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.url = ""
        self._cluster = cluster
        self._trust = ssl.create_default_context(cadata=cluster.ca) if cluster.ca else None
        self._session: aiohttp.ClientSession

    def writes(self) -> list[Call]:
        """Return the calls that write."""
        return [call for call in self.calls if call.method not in READS]

    def kubeconfig(self, path: Path, token: str | None = None) -> Path:
        """Write a kubeconfig with which a client uses this proxy; return its path."""
        user = {"token": self._cluster.token if token is None else token}
        whole = {
            "current-context": "proxy",
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "user"}}],
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "user", "user": user}],
        }
        path.write_text(json.dumps(whole))
        return path

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FaultProxy]:
        """Serve on loopback while the block runs."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0])
        connector = aiohttp.TCPConnector(limit=0, ssl=self._trust or True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            try:
                yield self
            finally:
                await runner.cleanup()
                # Without waiting for the server's part of closing TLS.
                await connector.close(abort_ssl=True)

    @contextmanager
    def beside(self) -> Iterator[FaultProxy]:
        """Serve in a thread while the block runs, for clients that are processes."""
        is_up = threading.Event()
        ends: list[Callable[[], object]] = []

        async def run() -> None:
            over = asyncio.Event()
            loop = asyncio.get_running_loop()
            ends.append(lambda: loop.call_soon_threadsafe(over.set))
            async with self.serve():
                is_up.set()
                await over.wait()

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        try:
            assert is_up.wait(PATIENCE_SECONDS), "the proxy did not start"
            yield self
        finally:
            ends[0]()
            thread.join(PATIENCE_SECONDS)

    def _fault(self, call: Call) -> Fault | None:
        for fault in self.faults:
            if fault.times != 0 and fault.match(call):
                fault.times = fault.times and fault.times - 1
                return fault
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        at = clock_gettime(CLOCK_BOOTTIME)
        call = Call(at, request.method, request.path, dict(request.query), body)
        self.calls.append(call)
        fault = self._fault(call) or Fault(lambda call: True)
        await asyncio.sleep(fault.slow_seconds)
        if fault.status:
            status = {"kind": "Status", "apiVersion": "v1", "code": fault.status}
            return web.json_response(status, status=fault.status, headers=fault.headers)
        try:
            return await self._pass_on(request, call, fault)
        except (Broken, aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    async def _pass_on(self, request: web.Request, call: Call, fault: Fault) -> web.StreamResponse:
        headers = CIMultiDict(
            (key, value) for key, value in request.headers.items() if key.lower() not in HOP
        )
        where = self._cluster.url + request.raw_path
        asked = self._session.request(
            request.method, where, headers=headers, data=call.body or None, allow_redirects=False
        )
        async with asked as answer, _left_at_once(answer):
            call.status = answer.status
            kept = [(k, v) for k, v in answer.headers.items() if k.lower() not in HOP]
            response = web.StreamResponse(status=answer.status, headers=CIMultiDict(kept))
            await response.prepare(request)
            sent = 0
            async for chunk in answer.content.iter_any():
                limits = (fault.reset_after, fault.keep_bytes)
                limit = min((limit for limit in limits if limit is not None), default=None)
                part = chunk if limit is None else chunk[: max(0, limit - sent)]
                if fault.is_silent:
                    await asyncio.Event().wait()
                await response.write(part)
                sent += len(part)
                if fault.reset_after is not None and sent >= fault.reset_after:
                    raise Broken
                if fault.keep_bytes is not None and sent >= fault.keep_bytes:
                    break
            await response.write_eof()
            return response


@asynccontextmanager
async def _left_at_once(answer: aiohttp.ClientResponse) -> AsyncIterator[None]:
    """Break the connection of an answer that was not read to its end.

    A normal close would wait for the server's part of closing TLS, for longer than a test runs.
    """
    try:
        yield
    finally:
        connection = answer.connection  # None: all has been read
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
