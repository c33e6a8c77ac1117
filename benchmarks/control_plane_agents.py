"""Agents without workers for `control_plane.py`: many in a process, each at an address of its own.

Each answers on `/v1/link` with the frames of a real one, in the same order and with the same
repetitions; its workers take no time to die or to start.  Orders come as lines of JSON on stdin,
and each is answered by a line on stdout.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from unbroken.wire.agent import (
    HEARTBEAT_KEY,
    HEARTBEAT_SECONDS,
    AgentReport,
    AgentState,
    FaultKind,
    WorkerFault,
    WorkerReport,
)
from unbroken.wire.agent_codec import encode_report
from unbroken.wire.observation import RankWatch
from unbroken.wire.proof import NONCE_HEADER, Seal, Unseal, greeting, nonce_of

PORT = 18080
FIRST_NET = int(os.environ.get("CONTROL_PLANE_NET", "224"))
"""Second octet of the first loopback address of the agents; local clusters use lower ones."""
WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""The GUID of the WebSocket handshake (RFC 6455, 1.3)."""
RESTATED = 0.8
"""Seconds between repetitions of a report, as in `agent_http.server`."""
HEARTBEAT = re.compile(rb"\?" + HEARTBEAT_KEY.encode() + rb"=([\d.]+) ")
TICK_SECONDS = 0.02
UP = (AgentState.RUNNING, AgentState.FAULTED, AgentState.STOPPING)
_SENTINEL = 7_000_000_000


def address(index: int) -> str:
    """Return the loopback address at which the agent of this number listens."""
    return f"127.{FIRST_NET + (index >> 16)}.{(index >> 8) & 255}.{index & 255}"


class Command(msgspec.Struct):
    """Fields of a command that these agents need."""

    type: str
    attempt: int | None = None
    faultCount: int = 0
    rank: int = 0
    master_addr: str = ""
    master_port: int = 0


@dataclass
class Tally:
    """Stops and starts of one attempt, and the time of the last of each."""

    stops: int = 0
    last_stop: float = 0.0
    starts: int = 0
    last_start: float = 0.0


class Frames:
    """Reports as the real codec writes them, with places for what differs between agents."""

    NAMES = ("attempt", "rank", "port", "offered", "step")

    def __init__(self, nproc: int, has_steps: bool) -> None:
        self.nproc = nproc
        marks = {name: _SENTINEL + i for i, name in enumerate(self.NAMES)}
        ranks = [_SENTINEL + 100 + i for i in range(nproc)]
        ready = AgentReport(
            "@agent", AgentState.READY, newest_attempt=marks["attempt"], rank=marks["rank"],
            nproc=nproc, pid=17, offered_port=marks["offered"], agent_version="0.1.0",
        )  # fmt: skip
        workers = tuple(
            WorkerReport(i, rank, 100 + i, "running", 1.7e9, first_output_at=1.7e9, start="warm")
            for i, rank in enumerate(ranks)
        )
        watch = tuple(
            RankWatch(
                rank, "train", marks["step"], float(marks["step"]), 0.5, 1.7e9, 30.0,
                metrics={"loss": 2.5}, first_step=0,
            )
            for rank in ranks
        )  # fmt: skip
        told = replace(
            ready, attempt=marks["attempt"], master_addr="@host", master_port=marks["port"]
        )
        fault = WorkerFault(FaultKind.SIGNAL, 0, ranks[0], 100, 1.7e9, signal=9, message="SIGKILL")
        begun = replace(told, state=AgentState.RUNNING)
        running = replace(begun, workers=workers, watch=watch if has_steps else ())
        faulted = replace(running, state=AgentState.FAULTED, faults=(fault,))
        stopping = replace(running, state=AgentState.STOPPING)
        idle = replace(ready, newest_attempt=None, rank=None)
        self._texts = {
            "idle": self._template(idle), "ready": self._template(ready),
            "begun": self._template(begun), "running": self._template(running),
            "faulted": self._template(faulted), "stopping": self._template(stopping),
        }  # fmt: skip

    def _template(self, report: AgentReport) -> str:
        text = encode_report(report).replace("@agent", "%(agent)s").replace("@host", "%(host)s")
        for i, name in enumerate(self.NAMES):
            text = re.sub(rf"{_SENTINEL + i}(\.0)?", f"%({name})d", text)
        for i in range(self.nproc):
            text = text.replace(str(_SENTINEL + 100 + i), f"%(r{i})d")
        return text

    def make(self, name: str, known: dict[str, Any]) -> bytes:
        """Return the payload of a frame, filled with the values of one agent."""
        return (self._texts[name] % known).encode()


def framed(code: int, payload: bytes) -> bytes:
    """Return a complete WebSocket frame with a text (1) or binary (2) payload."""
    size, head = len(payload), 0x80 | code
    if size < 126:
        return bytes((head, size)) + payload
    if size < 1 << 16:
        return bytes((head, 0x7E)) + size.to_bytes(2, "big") + payload
    return bytes((head, 0x7F)) + size.to_bytes(8, "big") + payload


@dataclass(eq=False, slots=True)
class Agent:
    """One agent: its present report, and the links to it."""

    home: Home
    known: dict[str, Any]
    says: str = "idle"
    frame: bytes = b""
    sent_at: float = 0.0
    restate_seconds: float = RESTATED * HEARTBEAT_SECONDS
    key: bytes | None = None
    """Key of its job. None if the job has no key."""
    uid: str = ""
    links: list[Link] = field(default_factory=list)

    def say(self, name: str) -> None:
        """Change the agent's report, and send it on all links."""
        self.says = name
        self.frame = self.home.frames.make(name, self.known)
        self.restate()

    def restate(self) -> None:
        """Send the present report again."""
        self.sent_at = self.home.now
        for link in self.links:
            link.tell(self.frame)

    def command(self, payload: bytes) -> None:
        """Follow a start or a stop, as `core.agent.machine` does when workers just obey."""
        command = msgspec.json.decode(payload, type=Command)
        if command.type == "stop" and command.attempt is not None:
            self._stop(command.attempt)
        elif command.type == "start":
            self._start(command)

    def _stop(self, attempt: int) -> None:
        known = self.known
        if self.says in ("running", "begun", "faulted") and known["attempt"] <= attempt:
            known["attempt"] = attempt
            self.home.note_stop(attempt)
            self.say("stopping")
            self.home.later.append((self, "ready"))
        else:
            if self.says == "idle":
                known["attempt"] = attempt
                self.says = "ready"
            self.say(self.says)

    def _start(self, command: Command) -> None:
        known, attempt = self.known, command.faultCount
        if self.says in ("idle", "ready") and attempt > known["attempt"]:
            known.update(
                attempt=attempt, rank=command.rank, host=command.master_addr,
                port=command.master_port, offered=20_000 + (known["offered"] + 7) % 10_000,
            )  # fmt: skip
            for i in range(self.home.frames.nproc):
                known[f"r{i}"] = command.rank * self.home.frames.nproc + i
            self.home.note_start(attempt)
            self.say("begun")
            self.home.later.append((self, "running"))
        else:
            self.restate()


class Link(asyncio.Protocol):
    """A WebSocket connection from an operator (RFC 6455), limited to whole text frames."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rest = b""
        self._is_open = False
        self._seal: Seal | None = None
        self._unseal: Unseal | None = None
        self.transport: asyncio.Transport

    def tell(self, payload: bytes) -> None:
        """Send a payload, sealed if the link has a key."""
        if self._seal is None:
            self.transport.write(framed(1, payload))
        else:
            self.transport.write(framed(2, self._seal(payload)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._agent.links:
            self._agent.links.remove(self)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if not self._is_open:
            head, end, self._rest = self._rest.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return
            self._open(head)
        for code, payload in self._frames():
            if code in (1, 2):
                said = payload if self._unseal is None else self._unseal(payload)
                if said:
                    self._agent.command(said)
                else:
                    self._join()
            elif code == 8:
                self.transport.write(b"\x88\x00")
                self.transport.close()

    def _open(self, head: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        key = {name.lower(): value for name, value in fields.items()}[b"sec-websocket-key"]
        accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET).digest())
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        target = head.split(b" ", 2)[1].decode()
        names = {name.lower(): value for name, value in fields.items()}
        nonce = nonce_of(names.get(NONCE_HEADER.lower().encode(), b"").decode())
        asked = HEARTBEAT.search(head.split(b"\r\n")[0])
        self._agent.restate_seconds = RESTATED * float(asked[1] if asked else HEARTBEAT_SECONDS)
        agent = self._agent
        if agent.key is None or nonce is None:
            self._join()
            return
        self._is_open = True
        message, session = greeting(agent.key, nonce, os.urandom(16), agent.uid, target)
        self.transport.write(framed(2, message))
        self._seal, self._unseal = Seal(session.up), Unseal(session.down)

    def _join(self) -> None:
        self._is_open = True
        self._agent.links.append(self)
        self._agent.say(self._agent.says)

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self._rest) >= 2:
            size, at = self._rest[1] & 127, 2
            if size == 126:
                size, at = int.from_bytes(self._rest[2:4], "big"), 4
            elif size == 127:
                size, at = int.from_bytes(self._rest[2:10], "big"), 10
            end = at + 4 + size
            if len(self._rest) < end:
                return
            mask, masked = self._rest[at : at + 4], self._rest[at + 4 : end]
            code, self._rest = self._rest[0] & 15, self._rest[end:]
            long_mask = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
            yield code, (int.from_bytes(masked, "big") ^ long_mask).to_bytes(size, "big")


class Home:
    """All agents of this process."""

    def __init__(self, first: int, count: int, nproc: int, has_steps: bool) -> None:
        self.frames = Frames(nproc, has_steps)
        self.has_steps = has_steps
        self.now = time.monotonic()
        self.later: list[tuple[Agent, str]] = []
        """Reports to send at the next turn: workers that end, workers that begin."""
        self.tallies: dict[int, Tally] = {}
        self.first = first
        self.agents = [self._agent(first + i) for i in range(count)]

    def _agent(self, index: int) -> Agent:
        ranks = {f"r{i}": 0 for i in range(self.frames.nproc)}
        known = {
            "agent": f"agent-{index}", "attempt": -1, "rank": 0, "host": "", "port": 0,
            "offered": 20_000 + index % 10_000, "step": 1, **ranks,
        }  # fmt: skip
        return Agent(self, known)

    def note_stop(self, attempt: int) -> None:
        """Count a running agent that received a stop."""
        tally = self.tallies.setdefault(attempt, Tally())
        tally.stops, tally.last_stop = tally.stops + 1, time.monotonic()

    def note_start(self, attempt: int) -> None:
        """Count an agent that received a start."""
        tally = self.tallies.setdefault(attempt, Tally())
        tally.starts, tally.last_start = tally.starts + 1, time.monotonic()

    async def listen(self) -> None:
        """Open a port for each agent."""
        loop = asyncio.get_running_loop()
        for i, agent in enumerate(self.agents):
            listener = socket.create_server((address(self.first + i), PORT), backlog=8)
            await loop.create_server(lambda agent=agent: Link(agent), sock=listener)

    async def beat(self) -> None:
        """Let workers end and begin, report steps, and repeat reports after a silence."""
        while True:
            await asyncio.sleep(TICK_SECONDS if not self.later else 0)
            self.now = time.monotonic()
            later, self.later = self.later, []
            for agent, name in later:
                agent.say(name)
            if not later:
                self._restate()

    def _restate(self) -> None:
        for agent in self.agents:
            if agent.sent_at > self.now - agent.restate_seconds or not agent.links:
                continue
            if self.has_steps and agent.says == "running":
                agent.known["step"] += 1
                agent.say("running")
            else:
                agent.restate()

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Answer an order of the harness."""
        if "fail" in order:
            agent = self.agents[order["fail"] - self.first]
            assert agent.says == "running", agent.says
            at = time.monotonic()
            agent.say("faulted")
            return {"failed_at": at}
        if "pod" in order:
            agent = self.agents[order["pod"] - self.first]
            agent.uid = order["uid"]
            agent.key = bytes.fromhex(order["key"]) if order["key"] else None
            return {}
        linked = sum(bool(agent.links) for agent in self.agents)
        running = sum(agent.says == "running" for agent in self.agents)
        tallies = {
            attempt: [one.stops, one.last_stop, one.starts, one.last_start]
            for attempt, one in self.tallies.items()
        }
        return {"linked": linked, "running": running, "tallies": tallies}


async def main() -> None:
    """Serve until stdin ends."""
    options = json.loads(sys.argv[1])
    home = Home(options["first"], options["count"], options["nproc"], options["steps"])
    await home.listen()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"listening": len(home.agents)}), flush=True)
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(home.beat())
        async for line in reader:
            print(json.dumps(home.answer(json.loads(line))), flush=True)
        beating.cancel()


if __name__ == "__main__":
    asyncio.run(main())
