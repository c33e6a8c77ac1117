"""The node's own HTTP server: logs and commands, for the API server that knows the token.

GET /containerLogs/NAMESPACE/POD/CONTAINER?follow&tailLines&...     text
GET /exec/NAMESPACE/POD/CONTAINER?command=...&stdin&stdout&stderr&tty  WebSocket
GET /portForward/NAMESPACE/POD?ports=...                              WebSocket
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from aiohttp import web

from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.listener import Connections, Limits, admitted, bound
from unbroken.local.node.pods.pod_worker import PodWorker
from unbroken.local.node.processes.exec_session import PROTOCOLS, ExecSession, Wanted
from unbroken.local.node_calls import INPUT_BYTES, is_authorized

from . import port_forwarding
from .context import NodeContext
from .logs import log_options, stream
from .port_forwarding import ForwardedPod

PORT = 10250
"""Kubelet's; on a machine where it is taken, any other."""
LIMITS = Limits(128)
"""Streams of logs, commands and sessions of port forwarding of one node's pods."""
Find = Callable[[str, str], PodWorker | None]


class NodeServer:
    """Serves while it is entered; `port` is known then."""

    def __init__(self, node: NodeContext, token: str, find: Find) -> None:
        self.port = 0
        self._node = node
        self._token = token
        self._find = find
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None

    async def __aenter__(self) -> NodeServer:
        app = web.Application(middlewares=[self._authorize])
        place = "{namespace}/{pod}/{container}"
        app.router.add_get("/healthz", _healthz)
        app.router.add_get(f"/containerLogs/{place}", self._logs)
        app.router.add_get(f"/exec/{place}", self._exec)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward_ports)
        try:
            (listening,) = await bound(self._node.address, PORT)
        except OSError:
            (listening,) = await bound(self._node.address, 0)
        self.port = listening.getsockname()[1]
        self._runner = web.AppRunner(app, shutdown_timeout=0.5, handler_cancellation=True)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server, LIMITS)
        self._connections.listen(listening)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        address = f"{self._node.address}:{self.port}"
        given = request.headers.get("Authorization", "")
        if not is_authorized(given, self._token, address, request.raw_path, wall()):
            raise web.HTTPUnauthorized(text="the node's token is needed")
        admitted(request)
        return await handler(request)  # type: ignore[misc, no-any-return]

    def _pod_worker(self, request: web.Request) -> PodWorker:
        pod = request.match_info["pod"]
        worker = self._find(request.match_info["namespace"], pod)
        if worker is None:
            raise web.HTTPNotFound(text=f'pod "{pod}" is not on this node')
        return worker

    def _worker(self, request: web.Request) -> tuple[PodWorker, str]:
        pod, container = request.match_info["pod"], request.match_info["container"]
        worker = self._pod_worker(request)
        names = [c.name for c in worker.machine.all]
        if container not in names:
            raise web.HTTPNotFound(text=f"container {container} is not in pod {pod}")
        return worker, container

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        worker, container = self._worker(request)
        try:
            options = log_options(request.query, self._node.clock())
        except SpecError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        pod = request.match_info["pod"]
        path = worker.log_path(container, previous=options.previous)
        if path is None:
            text = f'previous terminated container "{container}" in pod "{pod}" not found'
            if not options.previous:
                reason = worker.machine.container(container).waiting_reason or "ContainerCreating"
                text = f'container "{container}" in pod "{pod}" is waiting to start: {reason}'
            raise web.HTTPBadRequest(text=text)
        ended = worker.end_of(container, previous=options.previous)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for data in stream(path, options, ended):
            await response.write(data)
        await response.write_eof()
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        worker, container = self._worker(request)
        wanted = Wanted(
            argv=request.query.getall("command", []),
            stdin=_flag(request, "stdin", "input"),
            stdout=_flag(request, "stdout", "output"),
            stderr=_flag(request, "stderr", "error"),
            tty=_flag(request, "tty"),
        )
        if not wanted.argv:
            raise web.HTTPBadRequest(text="exec needs a command")
        target = worker.target(container)
        if target is None:
            raise web.HTTPBadRequest(text=f'container "{container}" does not run')
        socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=INPUT_BYTES)
        await socket.prepare(request)
        await ExecSession(self._node.launcher, target, wanted).run(socket)
        return socket

    async def _forward_ports(self, request: web.Request) -> web.StreamResponse:
        worker = self._pod_worker(request)
        namespace, name = request.match_info["namespace"], request.match_info["pod"]

        def address() -> str:
            return worker.address if self._find(namespace, name) is worker else ""

        pod = ForwardedPod(name, address, worker.pod["spec"])
        socket = web.WebSocketResponse(
            protocols=port_forwarding.PROTOCOLS, max_msg_size=port_forwarding.MESSAGE_BYTES
        )
        if socket.can_prepare(request).protocol == port_forwarding.TUNNEL:
            await socket.prepare(request)
            await port_forwarding.SpdySession(pod, socket).run()
            return socket
        try:
            ports = port_forwarding.ports_of(request.query.getall("ports", []))
        except SpecError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        await socket.prepare(request)
        await port_forwarding.ChannelSession(pod, socket, ports).run()
        return socket


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


def _flag(request: web.Request, *names: str) -> bool:
    return any(request.query.get(name, "") in ("1", "true", "True") for name in names)
