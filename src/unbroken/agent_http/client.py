"""The operator's side of one agent: it sends commands, receives reports, and reports a loss once.

With agents that offer `/v1/link` it keeps a WebSocket. To other agents, if they may be served
without a proof (`identity`), it sends the documented requests, and polls their status. A command
states what should be. A newer one replaces an older one that is still unsent, and one that may have
been lost with its link is sent again. A request for evidence or for imports is not a command: it is
sent once, on a link that is up, and never delays a command.

An agent is never trusted with the operator's time or memory. Its messages have a bound in size, and
a budget. An agent that exceeds it is read more slowly, and no other agent is, so that TCP holds it
up. A well-behaved agent reports each change, several of them at a start or a fault. Otherwise it
repeats its report once in `HEARTBEAT_SECONDS` or more rarely.

`Permit` is the permission to send a command to an agent, which may be withdrawn at any moment.
`AgentSilence` is the timeout for an agent's silence, in a process that may itself have been
stopped.

`Turns` limits how many agents are connected at once, of thousands. Connecting takes a millisecond
of the operator's processor. If an operator asked 12,500 agents at once, each would time out long
before its turn, and so would every retry.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Literal, Protocol

import aiohttp
from aiohttp.http import WSMessageNoDecodeText
from yarl import URL

from unbroken.budget import Bucket, Budget, Flow, Limits
from unbroken.errors import PeerError
from unbroken.log_lines import Log
from unbroken.runtime.drive import GLANCE_SECONDS
from unbroken.wire.agent import (
    HEARTBEAT_KEY,
    HEARTBEAT_SECONDS,
    HEARTBEAT_SECONDS_MAX,
    LINK_PATH,
    AgentReport,
    Beat,
    Command,
    Renewal,
    Request,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    ToAgent,
)
from unbroken.wire.agent_bodies import parse_json, report_of_status, start_body, stop_body
from unbroken.wire.agent_codec import (
    LINK_BYTES_MAX,
    REPORT_BYTES_MAX,
    EvidenceError,
    decode_answer,
    encode_command,
)
from unbroken.wire.observation import CollectCommand, Evidence
from unbroken.wire.proof import (
    NONCE_BYTES,
    NONCE_HEADER,
    TAG_BYTES,
    Seal,
    Stranger,
    Unseal,
    greeted,
)

from .identity import AgentIdentity
from .sessions import agent_session, closing, pace


class Permit(Protocol):
    """Asked just before a command is sent."""

    def is_given(self) -> bool:
        """True if it may be sent now."""

    async def given(self) -> None:
        """Return once it may be sent; without yielding to other tasks if it may already."""


class Always:
    """The permit for callers that need no permission."""

    def is_given(self) -> bool:
        """Always True."""
        return True

    async def given(self) -> None:
        """Return at once."""


class AgentSilence:
    """Time of the agent's last message, and whether silence counts now."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.received_at = self._loop.time()
        self.is_suspended = False

    def received(self) -> None:
        """Note a message of the agent."""
        self.received_at = self._loop.time()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not count the time of the block as silence."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
            self.received()


@asynccontextmanager
async def patience_of(seconds: float) -> AsyncIterator[AgentSilence]:
    """Raise TimeoutError in the block after this time without a call of `received`.

    Unlike `asyncio.timeout` it sets no timer for each call, because agents send often. A process
    that was stopped, or starved, sees the time pass before it sees the messages. So a silence
    counts only at the second look in a row, if that look comes in time.
    """
    loop, patience = asyncio.get_running_loop(), AgentSilence()
    glanced_at = patience.received_at
    timer: asyncio.TimerHandle

    def look(due: float) -> None:
        nonlocal timer, glanced_at
        now = loop.time()
        if patience.is_suspended:
            patience.received()
        heard_at = patience.received_at
        is_silent = now >= heard_at + seconds
        if is_silent and heard_at < glanced_at and now < due + GLANCE_SECONDS:
            limit.reschedule(now)
            return
        if is_silent:
            glanced_at = now
        due = now + GLANCE_SECONDS if is_silent else heard_at + seconds
        timer = loop.call_at(due, look, due)

    timer = loop.call_at(patience.received_at + seconds, look, patience.received_at + seconds)
    try:
        async with asyncio.timeout(None) as limit:
            yield patience
    finally:
        timer.cancel()


NO_LINK = (403, 404)
"""Status codes for a link request to an agent without links.

A stock agent answers 404, or 403 if its server (uvicorn) finds a library for WebSockets.
"""


def refusal_text(status: int) -> str:
    """Explain an agent that answers a link with this status."""
    if status == 401:
        return f"does not know the key of its job (HTTP {status})"
    return f"refused the link with HTTP {status}"


def text_of(error: Exception, seconds: float) -> str:
    """Explain an error of an agent in plain words; `seconds`: its timeout."""
    match error:
        case PeerError():
            return f"broke the protocol: {error}"
        case TimeoutError():
            return f"did not answer within {seconds:g} s"
        case aiohttp.ClientConnectorError():
            return text_of(error.os_error, seconds)
        case ConnectionRefusedError():
            return "refused the connection"
        case ConnectionError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "closed the connection"
        case OSError() if error.errno:
            return f"cannot be reached: {os.strerror(error.errno)}"
        case _:
            return f"cannot be talked to: {str(error)[:200] or type(error).__name__}"


AGENT = Limits(
    # An agent of 16 workers sends 2 a second, and 8 within a second of a start or a fault.
    messages=Flow(5.0, 40.0),
    # A report of 16 workers takes 4 to 25 KB.
    bytes=Flow(64 * 1024.0, 2 * 1024 * 1024.0),
    # A report takes 0.1 ms, one with the tracebacks of 16 workers 5 ms, one that was made to be
    # slow 50 ms.
    work=Flow(0.005, 0.05),
)
"""Limits of all connections of an agent together."""
STREAM = Flow(0.02, 0.5)
"""Work for the stream of one agent below its messages.  A report takes 0.1 ms; 128 KiB of empty
fragments, which make no message, take 0.1 s."""
WORK_OF_MESSAGE, WORK_OF_BYTE = 0.001, 1e-6
"""Most processor seconds that a message is charged: a constant, and an amount per byte.

More than that is due to Python's garbage collection rather than the agent: seconds with thousands
of agents.
"""
HEAVY_BYTES = 16 * 1024
"""Longest message, in bytes, that is read at the same time as others.

Longer messages of a job are read one at a time, and other jobs get their turn between, as one may
take 50 ms.
"""
CONNECTION_MESSAGES = 10.0
"""Messages charged for a connection of an agent that ends it and is connected to again at once."""


def chargeable(size: int, work: float) -> float:
    """Return what an agent is charged for bytes whose reading took this work."""
    most = WORK_OF_MESSAGE + WORK_OF_BYTE * size
    return work if work < most else most


TURNS_MAX = 64
TURN_SECONDS = 0.25
"""Seconds after which a slow connection no longer occupies its turn: agents that are cut off must
not hold up others."""


class Turns:
    """Lets a limited number connect at a time, in the order in which they came."""

    def __init__(self, most: int = TURNS_MAX) -> None:
        self._free = asyncio.Semaphore(most)
        self.random = random.Random()
        """Jitter for all links: one generator takes 2.5 KB."""
        self.links = 0
        """Number of links of the process, connected or not."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one more link during the block."""
        self.links += 1
        try:
            yield
        finally:
            self.links -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block or after `TURN_SECONDS`."""
        await self._free.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(TURN_SECONDS, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


log = Log(__name__)

MISSED_MAX = 3
"""Missing heartbeats after which the agent is lost, whatever the state of its connection."""
SILENCE_SECONDS = MISSED_MAX * HEARTBEAT_SECONDS
HEARTBEATS_A_SECOND = 4000
"""Heartbeats per second of all agents of a process; each costs it 75 us
(benchmarks/control_plane.py)."""
CONNECT_SECONDS = 1.0
CLOSE_SECONDS = 0.1
POLL_SECONDS = 0.15
"""Seconds between two polls of an agent without a link; the stock agent's own tick is 0.1 s."""
RETRY_FIRST_SECONDS, RETRY_LIMIT_SECONDS = 0.02, 1.0
ANSWER_BYTES_MAX = REPORT_BYTES_MAX
"""Longest answer of an agent to a documented request, in bytes; a stock agent's status has some
hundred."""
REQUESTS_MAX = 4
"""Requests that wait for the link to take them; older ones are dropped."""
QUESTIONS_MAX = 2
"""Answers with evidence that an agent may still have to send."""
PLAIN = {"Accept-Encoding": "identity"}
"""Request headers without compression: a short answer could be unpacked to a long one."""
BREACH_LIMIT_SECONDS = 30.0
"""Longest pause, in seconds, after an agent broke the protocol; it begins at 1 s and doubles."""
RETRY_FACTOR = 1.25
"""Factor from pause to pause: an agent that starts slowly is found within a fifth of its time."""
Socket = aiohttp.ClientWebSocketResponse[Literal[False]]
_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, PeerError)


@dataclass(frozen=True, slots=True)
class Broken:
    """Why the connection to the agent ended.

    `is_stock`: it answers, and has no link. `is_stranger`: it did not prove that it is the expected
    agent.
    """

    why: str
    is_stock: bool = False
    is_stranger: bool = False


@dataclass(frozen=True, slots=True)
class LinkResources:
    """Resources that the links of one program share, and the handler of agents without a proof."""

    session: aiohttp.ClientSession | None = None
    """None: each link opens a session of its own."""
    permit: Permit = field(default_factory=Always)
    """Asked before each command is sent."""
    turns: Turns = field(default_factory=Turns)
    """Turns for connecting to agents."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    """Seconds between two messages of an agent without news."""
    room: asyncio.Event = field(default_factory=lambda: _set(asyncio.Event()))
    """Set while reports may be passed on; an agent is not read while it is unset."""
    heavy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a long message is read."""
    on_stranger: Callable[[str], None] = lambda why: None
    """Called once for each reason why the agent is not believed."""
    on_unproven: Callable[[], None] = lambda: None
    """Called with each report of an agent that offers no proof, and is served."""


class AgentLink:
    """Keeps the connection to the agent at an address until `run` is cancelled.

    `on_report` gets every report, heartbeats too. `on_lost` is called once for each loss of an
    agent that had reported: it did not answer at once when its link had ended, or was silent.
    `on_evidence` gets the answers to `collect`.
    """

    def __init__(
        self,
        address: str,
        port: int,
        identity: AgentIdentity | None,
        on_report: Callable[[AgentReport], None],
        on_lost: Callable[[str], None],
        on_evidence: Callable[[Evidence], None] = lambda evidence: None,
        shared: LinkResources | None = None,
    ) -> None:
        self._shared = shared or LinkResources()
        # The clock of the loop, looked up once: finding the loop again for each frame of
        # thousands of agents takes three times as long as reading its clock.
        self._now = asyncio.get_running_loop().time
        self._base = URL.build(scheme="http", host=address, port=port)
        self._identity = identity
        """Identity to be proven; None: the job has no key, and any peer is accepted."""
        self._seal: Seal | None = None
        self._unseal: Unseal | None = None
        """Opens the sealed frames of this connection."""
        self._on_report = on_report
        self._on_lost = on_lost
        self._on_evidence = on_evidence
        self.report_bytes = 0
        """Length of the newest report as received."""
        self._budget = Budget("the agent", AGENT, self._now())
        self._stream = Bucket(STREAM, self._now())
        self._pending: Command | None = None
        self._unconfirmed: Command | None = None
        """Command sent on this connection, on which no message has arrived since."""
        self._has_command = asyncio.Event()
        self._is_linked = self._is_up = False
        self._requests: deque[Request] = deque(maxlen=REQUESTS_MAX)
        self._renewal: Renewal | None = None
        self._received_at = 0.0
        """Time of the agent's last message, by the loop's clock."""
        self._received_hash = 0
        """Hash of the last frame of this connection that had a report."""
        self._report: AgentReport | None = None
        self._questions = 0
        """Requests for evidence without an answer so far."""
        self._failures = self._breaches = 0
        self._why = ""
        """Reason of the last failure to reach the agent, as last logged."""

    def send(self, message: ToAgent) -> None:
        """Send a message.

        A command is sent as soon as the agent can be reached, the newest alone. A request is sent
        only if the agent is linked now.
        """
        if not isinstance(message, Request):
            self._pending = message
        elif self._is_linked:
            self._requests.append(message)
        if isinstance(message, CollectCommand):
            self._questions = min(self._questions + 1, QUESTIONS_MAX)
        if self._pending is not None or self._requests:
            self._has_command.set()

    def silent_seconds(self) -> float:
        """Return the seconds since the last message of the agent."""
        return self._now() - self._received_at

    def forget(self) -> None:
        """Drop the newest report: a heartbeat that repeats it is read again."""
        self._report = None

    async def run(self) -> None:
        """Connect, and connect again whenever that ends; returns only by cancellation."""
        if self._shared.session is not None:
            await self._run(self._shared.session)
            return
        async with agent_session() as session:
            await self._run(session)

    async def _run(self, session: aiohttp.ClientSession) -> None:
        is_stock = False
        with self._shared.turns.counted():
            while True:
                broken = await (self._poll(session) if is_stock else self._link(session))
                is_stock = broken.is_stock
                self._return_unconfirmed()
                if is_stock:
                    continue
                self._failures += 1
                if broken.is_stranger and broken.why != self._why:
                    self._shared.on_stranger(broken.why)
                # The first failure after a good period may concern the connection only: look again
                # at once.
                if self._failures > 1:
                    self._lose(broken.why)
                    await self._pause()
                elif delay := self._budget.spend(0, 0.0, self._now(), CONNECTION_MESSAGES):
                    await _first(asyncio.Event(), delay)

    def _lose(self, why: str) -> None:
        if self._why != why:
            self._why = why
            log.info("agent is unreachable", agent=self._base.authority, error=why)
        if self._is_up:
            self._is_up = False
            self._on_lost(why)

    async def _pause(self) -> None:
        grown = RETRY_FIRST_SECONDS * RETRY_FACTOR ** min(self._failures - 2, 64)
        delay = min(RETRY_LIMIT_SECONDS, grown)
        if self._breaches:
            delay = min(BREACH_LIMIT_SECONDS, 2.0 ** min(self._breaches - 1, 64))
        delay *= 1.0 - self._shared.turns.random.random() / 2
        await _first(asyncio.Event(), delay)

    def _broken(self, error: Exception, seconds: float) -> Broken:
        # A refused handshake may come from a proxy before an agent that is not up yet.
        is_refusal = isinstance(error, aiohttp.WSServerHandshakeError)
        if isinstance(error, PeerError | aiohttp.ClientResponseError) and not is_refusal:
            self._breaches += 1
            self._failures += 1  # No second look is needed.
        return Broken(self._about_agent(text_of(error, seconds)))

    def _about_agent(self, what: str) -> str:
        return f"the agent at {self._base.authority} {what}"

    def _received(self, report: AgentReport) -> None:
        if not self._is_up:
            log.info("agent answers", agent=self._base.authority, id=report.agent_id)
        self._is_up = True
        self._failures, self._why = 0, ""
        self._unconfirmed = None
        self._on_report(report)

    def _charge(self, size: int, work: float) -> float:
        """Charge a piece of the stream; return the seconds until the next one is read."""
        return self._stream.wait(chargeable(size, work), self._now())

    def _take(self) -> Command | None:
        self._has_command.clear()
        command, self._pending = self._pending, None
        return command

    def _return_unconfirmed(self) -> None:
        command, self._unconfirmed = self._unconfirmed, None
        # Only messages that name an attempt may arrive twice: any other could affect a later one.
        is_fenced = not isinstance(command, ShutdownCommand | None) and command.attempt is not None
        if is_fenced and self._pending is None:
            self._pending = command
            self._has_command.set()

    async def _link(self, session: aiohttp.ClientSession) -> Broken:
        """Talk over one WebSocket until it ends."""
        try:
            async with self._shared.turns.turn(), asyncio.timeout(CONNECT_SECONDS):
                socket = await self._connect(session)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in NO_LINK:
                return self._without_link()
            why = self._about_agent(refusal_text(error.status))
            return Broken(why, is_stranger=error.status == 401)
        except Stranger as error:
            return Broken(self._about_agent(str(error)), is_stranger=True)
        except _ERRORS as error:
            return self._broken(error, CONNECT_SECONDS)
        async with closing(socket, CLOSE_SECONDS), asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send_all(socket))
            self._is_linked = True
            try:
                return await self._receive_all(socket)
            finally:
                self._is_linked, self._renewal = False, None
                self._requests.clear()
                sending.cancel()

    def _without_link(self) -> Broken:
        """Decide about an agent that has no link, and so offers no proof."""
        why = None if self._identity is None else self._identity.refusal
        if why is None:
            return Broken(self._about_agent("has no link"), is_stock=True)
        # Nothing is asked or sent by the stock agent's protocol either.
        return Broken(self._about_agent(why), is_stranger=True)

    async def _connect(self, session: aiohttp.ClientSession) -> Socket:
        """Open a link to the expected agent. Raises Stranger, or one of `_ERRORS`."""
        url = self._base.with_path(LINK_PATH) % {HEARTBEAT_KEY: self._shared.heartbeat_seconds}
        nonce, identity = os.urandom(NONCE_BYTES), self._identity
        socket = await session.ws_connect(
            url,
            headers={} if identity is None else {NONCE_HEADER: nonce.hex()},
            max_msg_size=LINK_BYTES_MAX + TAG_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
            autoping=False,
            decode_text=False,
        )
        pace(socket, self._charge)
        if identity is None:
            return socket
        try:
            message = await socket.receive()
            if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                raise ConnectionResetError  # Perhaps the agent is ending.
            greeting = message.data if message.type is aiohttp.WSMsgType.BINARY else b""
            found = greeted(identity.key, nonce, identity.uid, url.raw_path_qs, greeting)
            self._seal, self._unseal = Seal(found.down), Unseal(found.up)
            identity.proofs.is_given = True
            # The agent sends nothing before it knows that this side has the key, too.
            await socket.send_bytes(self._seal(b""))
        except BaseException:
            await socket.close()
            raise
        return socket

    async def _receive_all(self, socket: Socket) -> Broken:
        """Take the agent's messages until they end; return why they ended."""
        self._received_hash, self._report, self._questions = 0, None, 0
        silence, budget = MISSED_MAX * self._shared.heartbeat_seconds, self._budget
        try:
            async with patience_of(silence) as patience:
                while True:
                    message = await socket.receive()
                    frame, work = self._frame_of(message), 0.0
                    size = 0 if frame is None else len(frame)
                    if frame is None:
                        if not await _take_other(socket, message):
                            break
                        patience.received()
                    elif size > HEAVY_BYTES:
                        work = await self._take_heavy(frame, patience)
                    else:
                        work = self._take_frame(frame)
                        patience.received_at = self._received_at
                    cost = chargeable(size, work) if work else 0.0
                    delay = budget.spend(size, cost, patience.received_at)
                    if delay or not self._shared.room.is_set():
                        # TCP holds the agent up meanwhile, which does not count as its silence.
                        with patience.suspended():
                            await _first(asyncio.Event(), delay)
                            await self._shared.room.wait()
            return Broken(self._about_agent("closed the link"))
        except TimeoutError:
            self._failures += 1  # Three heartbeats are missing: no second look is needed.
            return Broken(self._about_agent(f"was silent for {silence:g} s"))
        except _ERRORS as error:
            return self._broken(error, silence)

    async def _take_heavy(self, frame: bytes, patience: AgentSilence) -> float:
        """Take a long frame in its turn; return the processor seconds that it took."""
        with patience.suspended():
            async with self._shared.heavy:
                work = self._take_frame(frame)
                # The next frame of the job is not read before others have had their turn.
                await asyncio.sleep(0)  # noqa: TID251 - gives way, and waits for nothing
                return work

    def _take_frame(self, frame: bytes) -> float:
        """Take a frame; return the processor seconds that it took, 0 for a heartbeat."""
        # A heartbeat repeats the report.  Only its hash is kept: thousands of frames are large.
        heard, began, self._received_at = hash(frame), 0.0, self._now()
        # By the wall's clock an agent would be charged for whatever keeps this process from
        # running. For a short frame that is bounded (`WORK_OF_MESSAGE`). Reading the other clock
        # takes longer than reading the frame: a sixth of an operator's time.
        clock = perf_counter if len(frame) <= HEAVY_BYTES else thread_time
        if self._report is None or heard != self._received_hash:
            began = clock()
            questions = self._questions
            answer = self._answer(frame)
            if answer is None:
                # Requested evidence is not charged to the agent.
                return clock() - began if questions == self._questions else 0.0
            self._received_hash, self._report, self.report_bytes = heard, answer, len(frame)
        self._received(self._report)
        return clock() - began if began else 0.0

    def _frame_of(self, message: WSMessageNoDecodeText) -> bytes | None:
        """Return the frame of a message from the agent; None: it is not one of this protocol.
        Raises Stranger."""
        if self._unseal is None:
            return message.data if message.type is aiohttp.WSMsgType.TEXT else None
        if message.type is aiohttp.WSMsgType.TEXT:
            raise Stranger("sent a message without a tag")
        return self._unseal(message.data) if message.type is aiohttp.WSMsgType.BINARY else None

    def _answer(self, frame: bytes) -> AgentReport | None:
        """Return the report in a frame; None: it had something else, which was handled."""
        try:
            answer = decode_answer(frame, takes_evidence=self._questions > 0)
        except EvidenceError as error:
            log.warning("evidence refused", agent=self._base.authority, error=error)
            return None
        if isinstance(answer, Beat):
            if self._received_hash:
                # The operator waits for the lease of an agent that it has heard from and lost.
                self._renewal = Renewal(answer.at)
                self._has_command.set()
            return None
        if not isinstance(answer, Evidence):
            return answer
        self._questions -= 1
        self._on_evidence(answer)
        return None

    async def _send_all(self, socket: Socket) -> None:
        while True:
            await self._has_command.wait()
            await self._shared.permit.given()
            command, renewal, self._renewal = self._take(), self._renewal, None
            requests, self._requests = self._requests, deque(maxlen=REQUESTS_MAX)
            try:
                if renewal is not None:
                    await self._send(socket, encode_command(renewal))
                if command is not None:
                    self._unconfirmed = command
                    await self._send(socket, encode_command(command))
                for request in requests:
                    await self._shared.permit.given()
                    await self._send(socket, encode_command(request))
            except _ERRORS:
                return  # The receiving side sees this too, and ends the link.

    async def _send(self, socket: Socket, text: str) -> None:
        if self._seal is None:
            await socket.send_str(text)
        else:
            await socket.send_bytes(self._seal(text.encode()))

    async def _poll(self, session: aiohttp.ClientSession) -> Broken:
        """Use the documented requests until one fails, or the agent must prove its identity."""
        is_connected = False
        while (broken := self._without_link()).is_stock:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    if not is_connected:
                        # uvicorn closes the connection of a refused link without saying so. Then a
                        # request for the status is repeated on another connection, a command not.
                        await self._status(session)
                        is_connected = True
                    await self._post_pending(session)
                    report = await self._status(session)
            except _ERRORS as error:
                return self._broken(error, SILENCE_SECONDS)
            if not self._without_link().is_stock:
                continue  # An agent of the job has proven its key meanwhile.
            self._received(report)
            if self._identity is not None:
                self._shared.on_unproven()
            await self._shared.room.wait()
            # Polls have a rate of their own; only long answers make it slower.
            delay = self._budget.spend(self.report_bytes, 0.0, self._now(), 0.0)
            await _first(self._has_command, max(POLL_SECONDS, delay))
        return broken

    async def _post_pending(self, session: aiohttp.ClientSession) -> None:
        if not self._shared.permit.is_given():
            # Sent again after the next look at its status.
            self._has_command.clear()
            return
        command = self._take()
        if command is None:
            return
        self._unconfirmed = command
        code = await self._post(session, command)
        if code >= 500 and isinstance(command, StartCommand) and self._shared.permit.is_given():
            # A stock agent that failed during a start has begun it all the same, with the values
            # read by then (HyperPod agent 1.1.3). Once it is ready, the start is sent again.
            await self._post(session, StopCommand(command.attempt))

    async def _post(self, session: aiohttp.ClientSession, command: Command) -> int:
        """Send a command; return the status of the answer."""
        path, body = _request(command)
        url = self._base.with_path(path)
        async with session.post(
            url, json=body, headers=PLAIN, auto_decompress=False, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                text = (await _read(answer)).decode(errors="replace")[:500]
                log.warning(
                    "agent refused a request",
                    agent=self._base.authority,
                    path=path,
                    status=answer.status,
                    error=text,
                )
            return answer.status

    async def _status(self, session: aiohttp.ClientSession) -> AgentReport:
        url = self._base.with_path("/status")
        async with session.get(
            url, headers=PLAIN, auto_decompress=False, allow_redirects=False
        ) as answer:
            body = await _read(answer)
            if answer.status != 200:
                raise PeerError(f"/status is answered with HTTP {answer.status}")
        self.report_bytes = len(body)
        return report_of_status(parse_json(body))


def heartbeat_seconds(agents: int) -> float:
    """Return the heartbeat to request from each of this number of agents, in seconds."""
    fitting = agents / HEARTBEATS_A_SECOND
    return min(HEARTBEAT_SECONDS_MAX, max(HEARTBEAT_SECONDS, round(fitting, 1)))


def _request(command: Command) -> tuple[str, dict[str, object]]:
    if isinstance(command, ShutdownCommand):
        return "/shutdown", {}
    if isinstance(command, StartCommand):
        return "/start", start_body(command)
    return "/stop", stop_body(command)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            text = f"{answer.url.path} is answered with more than {ANSWER_BYTES_MAX} bytes"
            raise PeerError(text)
    return bytes(body)


async def _take_other(socket: Socket, message: WSMessageNoDecodeText) -> bool:
    """Take a message that is no text; return False if it is the end of the link. Raises
    PeerError."""
    match message.type:
        case aiohttp.WSMsgType.PING:
            await socket.pong(message.data)
        case aiohttp.WSMsgType.PONG:
            pass
        case aiohttp.WSMsgType.ERROR:
            raise PeerError(str(message.data)[:200])
        case _:
            return False
    return True


def _set(event: asyncio.Event) -> asyncio.Event:
    event.set()
    return event


async def _first(event: asyncio.Event, seconds: float) -> None:
    """Return at the event, or after this number of seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
