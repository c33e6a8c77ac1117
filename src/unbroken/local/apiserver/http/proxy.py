"""Logs, exec and port forwarding: passed on to the pod's node, as kube-apiserver does.

Clients that forward ports without a WebSocket get a connection that stops to speak HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import cast

import aiohttp
from aiohttp import web
from aiohttp.http_websocket import WebSocketReader
from yarl import URL

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import PeerError, SpecError
from unbroken.kube.clock import wall
from unbroken.local.apiserver.store import Store
from unbroken.local.listeners import strangers
from unbroken.local.node_calls import INPUT_BYTES, authorization

from .status import ApiError, Object, bad_request

SPDY = "spdy/3.1"
"""Value of the header Upgrade, in lower case."""
HELD_BYTES = 64 * 1024
"""Bytes that nobody has read, above which the client must wait."""


class Upgraded:
    """The bytes of a connection after `101 Switching Protocols`."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._held = bytearray()
        self._is_over = False
        self._arrived = asyncio.Event()

    async def accept(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the 101.  What is written to the response goes to the client as it is."""
        upgrade = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
        response = web.StreamResponse(status=101, headers={**upgrade, **headers})
        response.force_close()
        # aiohttp gives its own WebSockets their bytes in this way; it calls the two methods below.
        self._request.protocol.set_parser(cast("WebSocketReader", self))
        await response.prepare(self._request)
        return response

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take bytes of the client."""
        self._held += data
        if len(self._held) > HELD_BYTES and self._request.transport is not None:
            self._request.transport.pause_reading()
        self._arrived.set()
        return False, b""

    def feed_eof(self) -> None:
        """Take the end of the connection."""
        self._is_over = True
        self._arrived.set()

    async def read(self) -> bytes:
        """Return the client's next bytes, none at the end."""
        while not self._held and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._held)
        self._held.clear()
        if self._request.transport is not None:
            self._request.transport.resume_reading()
        return data

    def close(self) -> None:
        """End the connection, and with it a `read` that waits."""
        self._request.protocol.force_close()
        self.feed_eof()


PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Protocols of exec over a WebSocket, the newest first (kubectl 1.31 and later, the Python
client)."""
TUNNEL = "SPDY/3.1+portforward.k8s.io"
"""Port forwarding of kubectl 1.31 and later: a SPDY connection within a WebSocket."""
FORWARDING = "portforward.k8s.io"
"""Port forwarding of older clients: the same SPDY connection without a WebSocket."""
FORWARD_PROTOCOLS = (TUNNEL, "v4.channel.k8s.io")
"""Protocols of port forwarding over a WebSocket; the second is that of the Python client."""
FORWARD_BYTES = 2 << 20
"""Longest message of port forwarding, as on the node, and of the output of a command."""
ERROR_BYTES = 4096
"""Bytes of a node's error that are read: its own are shorter."""
CONNECT_SECONDS = 5.0
LOG_OPTIONS = (
    "follow",
    "previous",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "tailLines",
    "stream",
    "limitBytes",
)


ReadLog = Callable[[Mapping[str, str]], AsyncIterator[bytes]]
"""Reads a log as the options of a request ask; SpecError for values that make no sense."""


class NodeProxy:
    """Speaks to the nodes with the token that they share with this server.

    `own_logs` are the logs of pods that no node runs, by the pod's namespace/name.
    """

    def __init__(self, token: str, own_logs: Mapping[str, ReadLog]) -> None:
        self._token = token
        self._own_logs = own_logs
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections to the nodes."""
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = plain_session(timeout)
        return self._session

    def _headers(self, url: URL) -> dict[str, str]:
        """Headers of a call to a node, good for this call only."""
        said = authorization(self._token, url.authority, url.raw_path_qs, wall())
        return {"Authorization": said}

    async def forward(
        self, request: web.BaseRequest, subresource: str, pod: Object, store: Store
    ) -> web.StreamResponse:
        """Answer `log`, `exec` or `portforward` of a pod with what the pod's node says."""
        if subresource == "portforward":
            return await self._forward_ports(request, pod, node_address(pod, store))
        meta = pod["metadata"]
        container = container_of(pod, request.query.get("container", ""))
        if subresource == "log" and not pod["spec"].get("nodeName"):
            if read := self._own_logs.get(f"{meta['namespace']}/{meta['name']}"):
                return await _own_log(request, read)
            return web.Response(content_type="text/plain")  # nothing was said yet
        if subresource == "exec" and not _is_running(pod, container):
            raise bad_request(f'container not found ("{container}"): it is not running')
        base = node_address(pod, store)
        place = f"{meta['namespace']}/{meta['name']}/{container}"
        with _answering(pod):
            if subresource == "log":
                return await self._log(request, f"{base}/containerLogs/{place}")
            return await self._exec(request, f"{base}/exec/{place}")

    async def _log(self, request: web.BaseRequest, url: str) -> web.StreamResponse:
        _check_read(request)
        params = {name: request.query[name] for name in LOG_OPTIONS if name in request.query}
        asked = URL(url).with_query(params)
        async with self._client().get(asked, headers=self._headers(asked)) as upstream:
            if upstream.status != 200:
                raise await _as_error(upstream)
            response = web.StreamResponse(headers={"Content-Type": "text/plain"})
            response.enable_chunked_encoding()
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            except aiohttp.ClientPayloadError:
                # The node has gone.  The reader sees that the log is cut, and not that it ends.
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response

    async def _exec(self, request: web.BaseRequest, url: str) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise ApiError(
                501,
                "NotImplemented",
                "exec is offered over WebSocket only (v5.channel.k8s.io, v4.channel.k8s.io): "
                "use kubectl 1.31 or later, or a client library that speaks it",
            )
        chosen = _chosen(request, "exec", PROTOCOLS)
        query = [(name, value) for name, value in request.query.items() if name != "container"]
        asked = URL(url).with_query(query)
        async with self._client().ws_connect(
            asked, headers=self._headers(asked), protocols=[chosen], max_msg_size=FORWARD_BYTES
        ) as upstream:
            downstream = web.WebSocketResponse(protocols=[chosen], max_msg_size=INPUT_BYTES)
            await downstream.prepare(request)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(downstream, upstream))
                tasks.create_task(_pump(upstream, downstream))
            return downstream

    async def _forward_ports(
        self, request: web.BaseRequest, pod: Object, base: str
    ) -> web.StreamResponse:
        meta, phase = pod["metadata"], (pod.get("status") or {}).get("phase")
        if phase != "Running":
            raise bad_request(f"pod {meta['name']} does not run (phase {phase}): no port is open")
        upgrade = request.headers.get("Upgrade", "").lower()
        if upgrade == "websocket":
            chosen = _chosen(request, "port forwarding", FORWARD_PROTOCOLS)
        elif upgrade == SPDY and request.method == "POST":
            _check_version(request)
            chosen = TUNNEL
        else:
            raise bad_request(
                f"port forwarding needs an upgrade to a WebSocket, or a POST with Upgrade: {SPDY}"
            )
        url = URL(f"{base}/portForward/{meta['namespace']}/{meta['name']}")
        asked = url.with_query([("ports", value) for value in request.query.getall("ports", [])])
        with _answering(pod):
            upstream = await self._client().ws_connect(
                asked,
                headers=self._headers(asked),
                protocols=[chosen],
                max_msg_size=FORWARD_BYTES,
            )
        async with upstream:
            if upgrade == SPDY:
                return await _carry_spdy(request, upstream)
            downstream = web.WebSocketResponse(protocols=[chosen], max_msg_size=FORWARD_BYTES)
            await downstream.prepare(request)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(downstream, upstream))
                tasks.create_task(_pump(upstream, downstream))
            return downstream


async def _own_log(request: web.BaseRequest, read: ReadLog) -> web.StreamResponse:
    _check_read(request)
    try:
        chunks = read(request.query)
    except SpecError as error:
        raise bad_request(str(error)) from error
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    async for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


def _check_read(request: web.BaseRequest) -> None:
    if request.method != "GET":
        raise ApiError(405, "MethodNotAllowed", "logs are read with GET")


def _chosen(request: web.BaseRequest, what: str, known: Sequence[str]) -> str:
    """The subprotocol of a WebSocket; ApiError 400 if the client offers none of the known ones."""
    offered = request.headers.get("Sec-WebSocket-Protocol", "")
    chosen = [name for name in known if name in {p.strip() for p in offered.split(",")}]
    if not chosen:
        raise bad_request(f"{what} needs one of the subprotocols {', '.join(known)}")
    return chosen[0]


def _check_version(request: web.BaseRequest) -> None:
    """ApiError 403, as kubelet has it, if a client without WebSocket offers another protocol."""
    offered = request.headers.getall("X-Stream-Protocol-Version", [])
    if FORWARDING not in {name.strip() for value in offered for name in value.split(",")}:
        text = f"unable to upgrade: none of the protocols {offered} is {FORWARDING}"
        raise ApiError(403, "Forbidden", text[:1000])


@contextlib.contextmanager
def _answering(pod: Object) -> Iterator[None]:
    """Turn a refusal of a pod's node into ApiError 400, and a missing answer into 503."""
    node = pod["spec"]["nodeName"]
    try:
        yield
    except aiohttp.WSServerHandshakeError as error:
        path = error.request_info.url.path
        raise bad_request(f"node {node} answered {error.status} to {path}") from error
    except (aiohttp.ClientError, TimeoutError, PeerError) as error:
        text = f"node {node} does not answer: {error}"[:ERROR_BYTES]
        raise ApiError(503, "ServiceUnavailable", text) from error


async def _carry_spdy(
    request: web.BaseRequest, upstream: aiohttp.ClientWebSocketResponse
) -> web.StreamResponse:
    """Change the connection to SPDY, and carry its bytes to the node and back."""
    client = Upgraded(request)
    response = await client.accept({"X-Stream-Protocol-Version": FORWARDING})

    async def carry_up() -> None:
        with contextlib.suppress(ConnectionError):  # the node has gone
            while data := await client.read():
                await upstream.send_bytes(data)
        await upstream.close()

    async def carry_down() -> None:
        with contextlib.suppress(ConnectionError):  # the client has left
            async for message in upstream:
                if message.type is aiohttp.WSMsgType.BINARY:
                    await response.write(message.data)
        client.close()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(carry_up())
        tasks.create_task(carry_down())
    return response


Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


async def _pump(source: Socket, sink: Socket) -> None:
    """Copy messages until one side closes, then close the other."""
    try:
        async for message in source:
            if message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            elif message.type is aiohttp.WSMsgType.TEXT:
                await sink.send_str(message.data)
    except ConnectionError:
        pass  # the other side is gone; closing this one tells its end
    finally:
        await sink.close()


async def _as_error(upstream: aiohttp.ClientResponse) -> ApiError:
    text = (await upstream.content.read(ERROR_BYTES)).decode(errors="replace").strip()[:1000]
    reasons: Mapping[int, str] = {400: "BadRequest", 404: "NotFound"}
    reason = reasons.get(upstream.status)
    if reason is None:
        return ApiError(500, "InternalError", f"the node answered {upstream.status}: {text}")
    return ApiError(upstream.status, reason, text)


def container_of(pod: Object, wanted: str) -> str:
    """The container that a request means; ApiError 400 when that is not clear."""
    spec, meta = pod["spec"], pod["metadata"]
    regular = [item["name"] for item in spec["containers"]]
    init = [item["name"] for item in spec.get("initContainers") or []]
    if wanted:
        if wanted not in (*regular, *init):
            raise bad_request(f"container {wanted} is not valid for pod {meta['name']}")
        return wanted
    preferred = (meta.get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
    if preferred in regular:
        return str(preferred)
    if len(regular) == 1:
        return str(regular[0])
    raise bad_request(
        f"a container name must be specified for pod {meta['name']}, choose one of: "
        f"[{' '.join(regular)}]"
        + (f" or one of the init containers: [{' '.join(init)}]" if init else "")
    )


def _is_running(pod: Object, container: str) -> bool:
    status = pod.get("status") or {}
    result = [
        *(status.get("containerStatuses") or ()),
        *(status.get("initContainerStatuses") or ()),
    ]
    return any(c["name"] == container and "running" in (c.get("state") or {}) for c in result)


def node_address(pod: Object, store: Store) -> str:
    """URL of the node's own server; ApiError 400 or 503 when there is none."""
    name = pod["spec"].get("nodeName")
    if not name:
        raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
    entry = store.collection("nodes").entries.get(("", name))
    status = (entry.decode().get("status") or {}) if entry is not None else {}
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    addresses = [a["address"] for a in status.get("addresses") or [] if a["type"] == "InternalIP"]
    if not port or not addresses:
        raise ApiError(503, "ServiceUnavailable", f"node {name} serves no logs")
    try:
        others = strangers(addresses[0], port, {})
    except ValueError as error:
        raise ApiError(503, "ServiceUnavailable", f"node {name}: {error}") from error
    if others:
        # They would get the input of a command, and could send any log or output.
        text = f"node {name} is off, and user {others[0]} of this machine listens at its address"
        raise ApiError(503, "ServiceUnavailable", text)
    return f"http://{addresses[0]}:{port}"
