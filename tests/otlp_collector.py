"""A collector of traces: a real server that receives them by OTLP over HTTP, and keeps them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.watching import PATIENCE_SECONDS

Value = str | int | float | bool


class Collector:
    """Server that keeps the requests it receives; `status` is its answer."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._answers = asyncio.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Serve until it is closed."""
        self._answers.set()
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """Refuse connections from now on."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def hold(self) -> None:
        """Accept requests, but answer none."""
        self._answers.clear()

    def answer(self) -> None:
        """Answer all held requests."""
        self._loop.call_soon_threadsafe(self._answers.set)

    @property
    def spans(self) -> list[Span]:
        """All spans that came, as often as they came."""
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def until(self, holds: Callable[[list[Span]], object]) -> list[Span]:
        """Wait until `holds` is true of the spans; return them."""
        with self._news:
            if not self._news.wait_for(lambda: holds(self.spans), PATIENCE_SECONDS):
                raise AssertionError(f"not in time; there are: {self.spans}")
            return self.spans

    def resource(self) -> dict[str, Value]:
        """Return the attributes of the first sender."""
        return attributes(self.requests[0].resource_spans[0].resource.attributes)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        found = ExportTraceServiceRequest.FromString(await request.read())
        with self._news:
            self.requests.append(found)
            self.headers.append({key.lower(): value for key, value in request.headers.items()})
            self._news.notify_all()
        await self._answers.wait()
        return web.Response(status=self.status)


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    """Return the attributes of a span or a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector at its own port while the block runs."""
    made = Collector()
    made.start()
    try:
        yield made
    finally:
        made.close()
