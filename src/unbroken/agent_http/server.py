"""The agent's HTTP API: the documented endpoints of the HyperPod agent 1.1.3, and further ones
under /v1.

Where the stock agent answers 200 to a request that it drops, so does this one, unless the caller
sends `Unbroken-Strict: 1`. Unlike the stock agent, it applies a command as a whole or not at all,
and a repeated command never overwrites what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import ClientConnectionError, WSMsgType, hdrs, web

from unbroken.core.agent.link_order import LinkOrder
from unbroken.errors import PeerError, WorldError
from unbroken.foreign_numbers import INT32_MAX, finite_number
from unbroken.listener import BACKLOG, Connections, Limits, admitted
from unbroken.log_lines import Log
from unbroken.wire.agent import (
    HEARTBEAT_KEY,
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    IMPORTS_MAX,
    IMPORTS_PATH,
    LEASE_PATH,
    LINK_PATH,
    AgentReport,
    Beat,
    Command,
    PeerAnswer,
    PeerQuestion,
    Renewal,
    Request,
    ShutdownCommand,
    StartCommand,
)
from unbroken.wire.agent_bodies import (
    Status,
    Unprocessable,
    parse_json,
    start_command,
    status_body,
    stop_command,
)
from unbroken.wire.agent_codec import (
    LINK_BYTES_MAX,
    decode_command,
    encode_beat,
    encode_evidence,
    encode_report,
)
from unbroken.wire.codec import FRAME_BYTES_MAX, dump, load, read, write
from unbroken.wire.observation import COLLECT_SECONDS_MAX, CollectCommand, Evidence
from unbroken.wire.proof import HELLO_PATH, Seal, Stranger, Unseal

from .identity import Guard, LinkSeals, is_snapshot
from .snapshots import CopyStore, RequestRefused, SnapshotRoutes

log = Log(__name__)

STRICT_HEADER = "Unbroken-Strict"
LINKS_MAX = 32
LIMITS = Limits(256)
"""Limits of connections: eight times the operators that may be linked; the rest is for other nodes'
agents and for people."""
OPEN_PATHS = frozenset({"/v1/health", LINK_PATH})
"""Paths without a tag: the first reveals nothing, the second has a proof of its own."""
EVIDENCE_SECONDS = 5.0
"""Seconds for evidence requested by HTTP without a time."""
KEEP_ALIVE_SECONDS = 5.0
"""Seconds that an idle connection is kept, as by the stock agent's server."""
CLOSE_SECONDS = 0.1
"""Seconds for linked peers and unfinished answers when the agent ends."""
UNSENT_MILLISECONDS = 10_000
"""Milliseconds without acknowledgement after which an operator's machine counts as gone
(TCP_USER_TIMEOUT)."""
_RESTATED = 0.8
"""Share of a heartbeat after which a report is repeated; the rest is for transport."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServedAgent(Protocol):
    """The agent that the server represents."""

    def refusal(self, command: Command) -> str:
        """Return why the command cannot be followed now; empty: it can."""

    def command(self, command: Command) -> None:
        """Follow the command, or drop it if it cannot be followed."""

    def update(self, command: StartCommand) -> None:
        """Take over the addresses of the ranks, and no other value."""

    def ask(self, request: Request, answer: Callable[[Evidence], None]) -> None:
        """Follow a request; one for evidence is answered once, within its time."""

    def now(self) -> float:
        """Return the agent's own time, for Beats."""

    def renew(self, at: float) -> None:
        """Take the operator's answer to a Beat."""

    def vouch(self, question: PeerQuestion) -> PeerAnswer | None:
        """Answer another agent of the attempt; None: it is of another one."""

    def imports(self) -> Collection[str] | None:
        """Modules that workers import, for other agents."""

    def report(self) -> AgentReport:
        """Return the agent's state."""

    def status(self) -> Status:
        """Return the rest of the documented status."""

    def snapshots(self) -> CopyStore:
        """Copies of other nodes' snapshots."""


@dataclass(slots=True)
class _UnsentMessages:
    """Messages that one link has yet to send."""

    number: int
    """The link's place in the order of links."""
    restate_seconds: float
    """Seconds after which an unchanged report is repeated."""
    change: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a message to send."""
    faults: str = ""
    """The newest report with faults; empty: it was sent."""
    evidence: list[Evidence] = field(default_factory=list)
    is_asking: bool = False
    """A beat is to be sent at once: a start waits for its answer."""
    is_last: bool = False
    """Nothing follows the present report."""

    def answer(self, evidence: Evidence) -> None:
        """Send it after the pending reports."""
        self.evidence.append(evidence)
        self.change.set()


class AgentServer:
    """Serves an agent from `start` to `close`; call `publish` when its report has changed."""

    def __init__(self, agent: ServedAgent, guard: Guard | None, has_link: bool = True) -> None:
        self._agent = agent
        self._guard = guard
        """Proofs of the key; None: any caller is admitted."""
        self._links: dict[web.WebSocketResponse, _UnsentMessages] = {}
        self._senders: set[asyncio.Task[None]] = set()
        self._order = LinkOrder()
        self._frame = ""
        self._beats = False
        """A Beat goes with each report."""
        self._connections: Connections | None = None
        self._listener: socket.socket | None = None
        self._runner = web.AppRunner(
            self._application(has_link),
            handle_signals=False,
            shutdown_timeout=CLOSE_SECONDS,
        )

    def _application(self, has_link: bool) -> web.Application:
        application = web.Application(middlewares=[self._let_in], client_max_size=FRAME_BYTES_MAX)
        application.on_response_prepare.append(_drop_content_type)
        if self._guard is not None:
            application.on_response_prepare.append(self._guard.tag)
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/status", self._status),
            ("POST", "/start", self._start),
            ("POST", "/stop", self._stop),
            ("POST", "/update", self._update),
            ("POST", "/shutdown", self._shutdown),
            ("GET", "/v1/report", self._report),
            ("GET", "/v1/evidence", self._evidence),
            ("GET", "/v1/health", self._health),
            ("GET", IMPORTS_PATH, self._imports),
            ("POST", LEASE_PATH, self._lease),
        ]
        if has_link:
            routes.append(("GET", LINK_PATH, self._link))
        for method, path, handler in routes:
            application.router.add_route(method, path, handler)
        SnapshotRoutes(self._agent.snapshots).add_to(application.router)
        return application

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, a new one if port is 0. Raises WorldError."""
        self.publish(self._agent.report())
        await self._runner.setup()
        self._listener = listener = listening_socket(host, port)
        assert self._runner.server is not None
        self._connections = Connections(
            self._runner.server, LIMITS, keepalive_timeout=KEEP_ALIVE_SECONDS
        )
        self._connections.listen(listener)
        return int(listener.getsockname()[1])

    def stop_listening(self) -> None:
        """Close the port; existing connections stay."""
        if self._connections is not None:
            assert self._listener is not None
            # Until its program begins, a worker that is just starting holds a copy of the socket,
            # which would keep the port open.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._connections.close()
            self._connections = None

    async def close(self) -> None:
        """Send the newest report to every linked operator, and end all connections."""
        self.stop_listening()
        for unsent in self._links.values():
            unsent.is_last = True
            unsent.change.set()
        if self._senders:
            await asyncio.wait(self._senders, timeout=CLOSE_SECONDS)
        await asyncio.gather(*(link.close() for link in self._links))
        await self._runner.cleanup()

    def publish(self, report: AgentReport) -> None:
        """Send the report to every linked operator: of several at once only the newest.

        The newest report with faults is sent before it: READY no longer has them.
        """
        self._frame = encode_report(report)
        for unsent in self._links.values():
            if report.faults:
                unsent.faults = self._frame
            unsent.change.set()

    def beat(self) -> None:
        """Ask every linked operator, now and with each heartbeat, whether the workers are still
        wanted."""
        self._beats = True
        for unsent in self._links.values():
            unsent.is_asking = True
            unsent.change.set()

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit callers with the job's key, and answer errors in the documented form."""
        try:
            if self._guard is not None and request.path == HELLO_PATH:
                return self._guard.hello(request)
            if request.path not in OPEN_PATHS:
                if self._guard is not None:
                    await self._guard.admit(request)
                elif not is_snapshot(request):
                    await request.read()
                admitted(request)
            return await handler(request)
        except Unprocessable as error:
            return _detail(422, error.problems)
        except RequestRefused as error:
            answer = _detail(error.status, str(error))
            if error.status == 401:
                answer.force_close()
            return answer
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return _detail(405, error.reason, {"Allow": allowed})
        except web.HTTPClientError as error:
            return _detail(error.status, error.reason)

    async def _status(self, _: web.Request) -> web.Response:
        """Answer with the state in the form of HyperPod's agent."""
        return self._status_answer()

    def _status_answer(self) -> web.Response:
        return _raw(status_body(self._agent.report(), self._agent.status()))

    async def _start(self, request: web.Request) -> web.Response:
        """Start the workers of an attempt."""
        return self._apply(request, start_command(parse_json(await request.read())))

    async def _stop(self, request: web.Request) -> web.Response:
        """Stop the workers."""
        body = await request.read()
        return self._apply(request, stop_command(parse_json(body) if body.strip() else None))

    async def _shutdown(self, request: web.Request) -> web.Response:
        """Stop the workers and end the agent."""
        return self._apply(request, ShutdownCommand())

    def _apply(self, request: web.Request, command: Command) -> web.Response:
        refusal = self._agent.refusal(command)
        if refusal:
            log.info("command refused", path=request.path, reason=refusal)
            is_strict = request.headers.get(STRICT_HEADER) == "1"
            return _detail(409, refusal) if is_strict else web.Response()
        self._agent.command(command)
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        """Take the addresses of all ranks."""
        self._agent.update(start_command(parse_json(await request.read())))
        return self._status_answer()

    async def _report(self, _: web.Request) -> web.Response:
        """Answer with the agent's newest report: state, workers, faults, steps."""
        return web.Response(text=self._frame, content_type="application/json")

    async def _evidence(self, request: web.Request) -> web.Response:
        """Examine the workers for `?seconds=`, and answer with stacks and system calls."""
        given = request.query.get("seconds", str(EVIDENCE_SECONDS))
        seconds = finite_number(given, 0.0, COLLECT_SECONDS_MAX)
        if seconds is None:
            return _detail(422, f"seconds: a number from 0 to {COLLECT_SECONDS_MAX:g}")
        report = self._agent.report()
        attempt = report.attempt if report.attempt is not None else report.newest_attempt
        answer: asyncio.Future[Evidence] = asyncio.get_running_loop().create_future()
        self._agent.ask(CollectCommand(0, attempt or 0, seconds), _into(answer))
        text = encode_evidence(await answer)
        return web.Response(text=text, content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        """Answer 200 while the agent runs."""
        return web.json_response({"status": "ok"})

    async def _lease(self, request: web.Request) -> web.Response:
        """Answer another agent of the attempt: how long ago all agents certainly ran it."""
        try:
            question = read(PeerQuestion, load(await request.read()), "question")
        except PeerError as error:
            return _detail(422, str(error))
        answer = self._agent.vouch(question)
        if answer is None:
            return _detail(409, "another attempt, or no child of this agent")
        return web.Response(text=dump(write(answer)), content_type="application/json")

    async def _imports(self, _: web.Request) -> web.Response:
        """Answer with the names of modules that the workers import."""
        return web.json_response({"modules": list(self._agent.imports() or ())[:IMPORTS_MAX]})

    async def _link(self, request: web.Request) -> web.StreamResponse:
        """Open the WebSocket by which the operator sends commands and receives reports."""
        if len(self._links) >= LINKS_MAX:
            return _detail(503, f"{LINKS_MAX} operators are linked already")
        channel = web.WebSocketResponse(
            max_msg_size=FRAME_BYTES_MAX, timeout=CLOSE_SECONDS, compress=False
        )
        link, number = LinkSeals(), self._order.ask()
        if self._guard is None:
            await channel.prepare(request)
        else:
            try:
                link = await self._guard.link(request, channel)
            except (Stranger, ConnectionError) as error:
                log.warning("link refused", path=LINK_PATH, error=error)
                await channel.close()
                return channel
        admitted(request)
        _bound_unsent(request)
        unsent = _UnsentMessages(number, _RESTATED * _heartbeat_seconds(request))
        self._links[channel] = unsent
        self._order.open(number)
        unsent.change.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._send_reports(channel, unsent, link.seal))
                self._senders.add(sending)
                sending.add_done_callback(self._senders.discard)
                await self._receive_commands(channel, unsent, link.unseal)
                sending.cancel()
        finally:
            del self._links[channel]
        return channel

    async def _send_reports(
        self, channel: web.WebSocketResponse, unsent: _UnsentMessages, seal: Seal | None
    ) -> None:
        async def send(text: str) -> None:
            if seal is None:
                await channel.send_str(text)
            else:
                await channel.send_bytes(seal(text.encode()))

        # Not with each report: an operator reads an agent that sends too much more slowly.
        clock, beat_at = asyncio.get_running_loop().time, -math.inf
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(unsent.restate_seconds):
                    await unsent.change.wait()
            unsent.change.clear()
            is_last, faults, unsent.faults = unsent.is_last, unsent.faults, ""
            try:
                if faults not in ("", self._frame):
                    await send(faults)
                await send(self._frame)
                is_due = clock() >= beat_at + unsent.restate_seconds / 2
                if self._beats and (is_due or unsent.is_asking):
                    unsent.is_asking, beat_at = False, clock()
                    await send(encode_beat(Beat(self._agent.now())))
                while unsent.evidence:
                    await send(encode_evidence(unsent.evidence.pop(0), LINK_BYTES_MAX))
            except (ClientConnectionError, ConnectionError):
                return  # The receiving side sees this too, and ends the link.
            if is_last:
                return

    async def _receive_commands(
        self, channel: web.WebSocketResponse, unsent: _UnsentMessages, unseal: Unseal | None
    ) -> None:
        """Receive commands until the link ends, or a message comes from a peer without the key."""
        async for message in channel:
            if message.type is not (WSMsgType.TEXT if unseal is None else WSMsgType.BINARY):
                if unseal is None:
                    continue
                log.warning("link ended: a message without a tag", path=LINK_PATH)
                break
            try:
                command = decode_command(message.data if unseal is None else unseal(message.data))
            except Stranger as error:
                log.warning("link ended", path=LINK_PATH, error=error)
                break
            except PeerError as error:
                log.warning("message dropped", path=LINK_PATH, error=error)
                continue
            if isinstance(command, Request):
                self._agent.ask(command, unsent.answer)
                continue
            if not self._order.may_command(unsent.number):
                # An operator that is alive links again, and repeats its command.
                log.warning("link ended: a newer link commands", path=LINK_PATH)
                break
            self._take(command)
            if not isinstance(command, Renewal):
                # Answer with the state, even if the command has changed nothing.
                unsent.change.set()

    def _take(self, command: Command | Renewal) -> None:
        if isinstance(command, Renewal):
            self._agent.renew(command.at)
            return
        refusal = self._agent.refusal(command)
        if refusal:
            log.info("command refused", path=LINK_PATH, reason=refusal)
        self._agent.command(command)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Raises WorldError with what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise WorldError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another with --server-host and --server-port"
        ) from error
    listener.setblocking(False)
    return listener


def _heartbeat_seconds(request: web.Request) -> float:
    """Return the heartbeat that the link requests, in seconds."""
    asked = finite_number(request.query.get(HEARTBEAT_KEY, ""), HEARTBEAT_SECONDS, INT32_MAX)
    return HEARTBEAT_SECONDS if asked is None else min(asked, HEARTBEAT_SECONDS_MAX)


def _bound_unsent(request: web.Request) -> None:
    transport = request.transport
    result = transport.get_extra_info("socket") if transport is not None else None
    if result is not None:
        result.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MILLISECONDS)


def _into(answer: asyncio.Future[Evidence]) -> Callable[[Evidence], None]:
    """Send the answer to the caller, unless it has gone meanwhile."""

    def put(evidence: Evidence) -> None:
        if not answer.done():
            answer.set_result(evidence)

    return put


def _raw(value: dict[str, Any]) -> web.Response:
    return web.Response(body=_compact(value))


def _detail(status: int, detail: object, headers: dict[str, str] | None = None) -> web.Response:
    answer = web.Response(status=status, headers=headers, body=_compact({"detail": detail}))
    answer.content_type = "application/json"
    return answer


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def _drop_content_type(_: web.Request, response: web.StreamResponse) -> None:
    """Drop the content type: the stock agent names none for its status, nor for empty answers."""
    response.headers[hdrs.SERVER] = "unbroken"
    if response.headers.get(hdrs.CONTENT_TYPE) == "application/octet-stream":
        del response.headers[hdrs.CONTENT_TYPE]
