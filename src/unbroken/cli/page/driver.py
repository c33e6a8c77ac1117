"""Runs the live page beside a local cluster: socket, clocks, samples of running jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from unbroken.cli.connection import JOBS, Cluster
from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError, UnbrokenError, WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import monotonic, pause, wall
from unbroken.listener import Connections, Limits, bound
from unbroken.local.state import Paths
from unbroken.log_lines import Log

from . import values
from .access import Access, read_page_file, write_page_file
from .server import COST_FACTOR, Clock, PageServer, Source

log = Log(__name__)

HOST = "127.0.0.1"
LIMITS = Limits(64)
CLOSING_SECONDS = 0.5
"""Seconds for streams to end when the cluster stops; browsers connect again."""


class Pages:
    """Reads the contents of pages from a cluster."""

    def __init__(self, place: ClusterPlace, client: KubeClient) -> None:
        self._place = place
        self._client = client
        self._pasts: values.Pasts = {}

    def _cluster(self, namespace: str = "default") -> Cluster:
        return Cluster(self._place, self._client, namespace)

    async def read(self, path: tuple[str, ...]) -> dict[str, Any]:
        """The contents of a page; SpecError if there is none at this path."""
        match path:
            case ("jobs",):
                return await values.jobs_page(self._cluster(), self._pasts, wall())
            case ("nodes",):
                return await values.nodes_page(self._cluster(), wall())
            case ("jobs", namespace, name) if namespace and name:
                inside = self._cluster(namespace)
                return await values.job_page(inside, name, self._pasts, wall())
            case ("jobs", namespace, name, "incidents", text) if namespace and name:
                number = whole_number(text, 1, INT32_MAX)
                if number is not None:
                    inside = self._cluster(namespace)
                    return await values.incident_page(inside, name, number, wall())
        raise SpecError("there is no such page")

    async def text(self, namespace: str, name: str, number: int) -> str:
        """The story of an incident."""
        return await values.incident_text(self._cluster(namespace), name, number, wall())

    async def sample(self) -> None:
        """Sample the running jobs for ever, in at most 5 % of the time."""
        while True:
            began = monotonic()
            try:
                jobs = await self._cluster().select(JOBS, namespace="")
                await values.sample(self._cluster(), self._pasts, wall(), jobs)
            except UnbrokenError as error:
                log.warning("jobs not sampled for the page", error=error)
            except Exception as error:  # noqa: BLE001 -- the page must not end its cluster
                log.error("jobs not sampled for the page", error=repr(error))
            cost = monotonic() - began
            await pause(max(values.SAMPLE_SECONDS, COST_FACTOR * cost))


@asynccontextmanager
async def serving_page(paths: Paths, client: KubeClient, port: int) -> AsyncIterator[str]:
    """Serve the page of a local cluster during the block; yield its address.

    `port` 0: the port of the last time if it is free, else any.  Raises WorldError.
    """
    before = read_page_file(paths.ui)
    sockets = await _bound(port, 0 if before is None else before.port)
    actual = int(sockets[0].getsockname()[1])
    pages = Pages(ClusterPlace(str(paths.kubeconfig), None, paths), client)
    access = Access(write_page_file(paths.ui, actual).key)
    clock = Clock(wall, monotonic, pause)
    server = PageServer(Source(pages.read, pages.text), access, clock, f"unbroken-{actual}")
    # A stream whose browser has left ends at once: nothing else ends it before its next change.
    runner = web.AppRunner(
        server.application(), shutdown_timeout=CLOSING_SECONDS, handler_cancellation=True
    )
    await runner.setup()
    assert runner.server is not None
    connections = Connections(runner.server, LIMITS)
    try:
        for socket in sockets:
            connections.listen(socket)
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(pages.sample())
            yield f"http://{HOST}:{actual}/"
            sampling.cancel()
    finally:
        connections.close()
        await runner.cleanup()


async def _bound(port: int, last: int) -> Any:
    """Listen on the given port; without one (0), on that of the last time, or else on any."""
    tried = (port,) if port else dict.fromkeys((last, 0))
    for one in tried:
        try:
            return await bound(HOST, one)
        except OSError as error:
            reason = error.strerror
    raise WorldError(f"cannot serve the page at {HOST}:{port}: {reason}; choose another --ui-port")
