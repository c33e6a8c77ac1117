"""The operator's side: how an agent is reached, lost, found again, and spoken to without a link.

Agents and operators share one process and a virtual clock; test_agent_link_processes.py has a real
agent that is frozen and killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from tests import loopback
from tests.agent.running import Operator, linked, start, stop
from tests.agent.virtual_agents import agent
from tests.virtual_time import advance, in_virtual_time
from tests.watching import until
from unbroken.agent_http.client import SILENCE_SECONDS, heartbeat_seconds
from unbroken.core.agent.faults import SIGKILL, WorkerEnd
from unbroken.wire.agent import (
    HEARTBEAT_SECONDS,
    AgentReport,
    AgentState,
    Beat,
    Command,
    Renewal,
    ShutdownCommand,
)
from unbroken.wire.agent_codec import (
    decode_command,
    decode_report,
    encode_beat,
    encode_command,
    encode_report,
)


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_healthy_agent_is_heard_within_each_heartbeat() -> None:
    async with agent() as one, one.operator() as operator:
        await operator.state(AgentState.READY)
        for _ in range(50):
            began = now()
            await operator.more(1)
            assert 0 < now() - began < HEARTBEAT_SECONDS
            assert operator.reports[-1] == operator.reports[-2]


@pytest.mark.parametrize(("agents", "seconds"), [(0, 1.0), (4000, 1.0), (12_500, 3.1), (10**7, 60)])
def test_many_agents_are_asked_for_fewer_heartbeats(agents: int, seconds: float) -> None:
    assert heartbeat_seconds(agents) == seconds


@in_virtual_time
async def test_a_command_waits_for_the_agent_and_the_newest_wins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with linked(port, uid=None) as operator:
        operator.send(start(0))
        operator.send(start(5))
        await asyncio.sleep(10)
        async with agent(port=port) as one:
            report = await operator.state(AgentState.RUNNING)
            assert (report.attempt, report.newest_attempt) == (5, 5)
            assert operator.losses == [], "it was not there yet, which is no loss"
            operator.send(ShutdownCommand())
            assert await one.ended == 0
            await operator.until(lambda: len(operator.losses) == 1)


@in_virtual_time
async def test_a_silent_agent_is_lost_once_and_found_again() -> None:
    async with agent() as one, one.wire() as wire, linked(wire.port, uid=None) as operator:
        operator.send(start(0))
        report = await operator.workers(0)
        began = now()
        wire.hold()
        await operator.until(lambda: bool(operator.losses))
        assert SILENCE_SECONDS - 1 < now() - began < SILENCE_SECONDS + 2
        assert operator.losses == [f"the agent at 127.0.0.1:{wire.port} was silent for 3 s"]
        await asyncio.sleep(60)
        count = len(operator.reports)
        wire.release()
        await operator.until(lambda: len(operator.reports) > count)
        assert operator.reports[-1].agent_id == report.agent_id
        assert operator.reports[-1].state is AgentState.RUNNING
        assert len(operator.losses) == 1


@in_virtual_time
async def test_an_operator_that_was_held_up_itself_loses_nobody() -> None:
    async with agent() as one, one.operator() as operator:
        await operator.state(AgentState.READY)
        # As on a machine without free processor time, or one that was suspended.
        for beyond in (0.05, 0.5, 3600):
            await operator.more(1)
            advance(SILENCE_SECONDS + beyond)
            await operator.more(4)
            assert operator.losses == []


@in_virtual_time
async def test_a_killed_agent_is_lost_at_once_and_the_next_one_has_another_name() -> None:
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(agent())
        wire = await stack.enter_async_context(one.wire())
        operator = await stack.enter_async_context(linked(wire.port, uid=None))
        report = await operator.state(AgentState.READY)
        began = now()
        wire.cut()
        await operator.until(lambda: bool(operator.losses))
        assert now() - began < HEARTBEAT_SECONDS
        assert operator.losses == [f"the agent at 127.0.0.1:{wire.port} refused the connection"]
        await stack.enter_async_context(agent(port=wire.port))
        again = await operator.report(lambda r: r.agent_id != report.agent_id)
        assert again.newest_attempt is None
        assert len(operator.losses) == 1


@in_virtual_time
async def test_two_operators_hear_the_same_and_do_no_harm() -> None:
    async with agent() as shared, shared.operator() as one, shared.operator() as other:
        one.send(start(0))
        other.send(start(0))
        report = await one.workers(0)
        assert await other.workers(0) == report
        await _repeat(one, stop(0), lambda: one.reports[-1].state is AgentState.READY)
        other.send(start(0))  # It has received nothing yet, and comes too late.
        await _repeat(one, start(1), lambda: one.reports[-1].attempt == 1)
        report = await other.workers(1)
        assert (await one.workers(1)).workers == report.workers
        assert one.losses == other.losses == []


async def _repeat(operator: Operator, command: Command, holds: Callable[[], bool]) -> None:
    """Send a command until it takes effect, as the job does: an older link must be made again."""
    while not holds():
        operator.send(command)
        await operator.more(1)


@in_virtual_time
async def test_late_commands_of_a_dead_operator_are_refused() -> None:
    async with agent(key=None) as one, aiohttp.ClientSession() as session:
        dead = await session.ws_connect(f"http://127.0.0.1:{one.port}/v1/link")
        async with one.operator() as operator:
            await operator.state(AgentState.READY)
            await dead.send_str(encode_command(start(0, master_port=1)))
            while (message := await dead.receive()).type is aiohttp.WSMsgType.TEXT:
                assert decode_report(message.data).newest_attempt is None
            assert dead.closed
            assert one.report().newest_attempt is None
            operator.send(start(0))
            report = await operator.workers(0)
            assert report.master_port == start(0).master_port


@in_virtual_time
async def test_an_operator_that_lives_commands_again_over_a_newer_link() -> None:
    async with agent() as one, one.operator() as operator:
        await operator.state(AgentState.READY)
        async with one.operator() as other:
            await other.state(AgentState.READY)
        await _repeat(operator, start(0), lambda: operator.reports[-1].attempt == 0)
        assert operator.losses == []


@in_virtual_time
async def test_stale_and_doubled_commands_are_answered_and_change_nothing() -> None:
    async with agent() as one, one.operator() as operator:
        operator.send(start(2))
        before = await operator.workers(2)
        for command in (start(2), start(1), start(3), start(2, rank=7, nnodes=8), stop(1)):
            began = now()
            operator.send(command)
            await operator.more(1)
            assert now() == began, "answered at once"
        assert operator.reports[-1] == before


@in_virtual_time
async def test_a_wrong_key_is_no_loss_and_no_agent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        agent() as one,
        linked(one.port, bytes(32), None) as stranger,
        one.operator() as operator,
    ):
        stranger.send(start(0))
        operator.send(start(1))
        await operator.workers(1)
        assert (stranger.reports, stranger.losses) == ([], [])
        await until(lambda: caplog.text, lambda text: "does not prove that it has the" in text)


@in_virtual_time
async def test_an_agent_without_a_link_is_asked_and_told_by_requests() -> None:
    async with agent(key=None, link=False) as one, one.operator() as operator:
        first = await operator.state(AgentState.READY)
        assert first.agent_id.startswith("stock-")
        operator.send(start(0))
        report = await operator.state(AgentState.RUNNING)
        assert (report.rank, report.attempt, report.offered_port) == (0, None, None)
        one.workers.end(1, WorkerEnd(signal=SIGKILL))
        report = await operator.state(AgentState.FAULTED)
        assert (report.reason, report.agent_id) == ("WorkerCrash", first.agent_id)
        operator.send(stop(0))
        await operator.state(AgentState.READY)
        operator.send(start(1))
        await operator.state(AgentState.RUNNING)
        operator.send(ShutdownCommand())
        assert await one.ended == 0
        await operator.until(lambda: len(operator.losses) == 1)


class Stumbling:
    """HyperPod's own agent with two flaws that it has in some installations.

    Its server finds a library for WebSockets (uvicorn: 403, and the connection is closed without a
    header that says so). It cannot keep its table of addresses: the first start is carried out, but
    answered with 500.
    """

    def __init__(self) -> None:
        self.state = "ready"
        self.told: list[str] = []
        self.app = web.Application()
        self.app.router.add_get("/v1/link", self._refuse)
        self.app.router.add_get("/status", self._status)
        for path in ("/start", "/stop"):
            self.app.router.add_post(path, self._take)

    async def _refuse(self, request: web.Request) -> web.StreamResponse:
        answer = web.Response(status=403)
        await answer.prepare(request)
        await answer.write_eof()
        assert request.transport is not None
        request.transport.close()
        return answer

    async def _status(self, _: web.Request) -> web.StreamResponse:
        entered = {"INIT": "2026-01-01T00:00:00.000000+00:00"}
        return web.json_response({"status": self.state, "transitions": entered})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.told.append(request.path)
        self.state = "running" if request.path == "/start" else "ready"
        if self.told == ["/start"]:
            raise web.HTTPInternalServerError
        return web.Response()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """Serve at a port of its own."""
        async with loopback.serving(self.app) as port:
            yield port


@pytest.mark.parametrize(("command", "path"), [(start(0), "/start"), (stop(0), "/stop")])
@in_virtual_time
async def test_a_command_that_waits_reaches_an_agent_that_refuses_the_link(
    command: Command, path: str
) -> None:
    agent = Stumbling()
    async with agent.served() as port, linked(port, key=None) as operator:
        operator.send(command)
        await operator.until(lambda: agent.told[:1] == [path])
        assert operator.losses == []


@in_virtual_time
async def test_an_agent_that_refuses_the_link_is_asked_and_one_that_stumbles_is_stopped() -> None:
    agent = Stumbling()
    async with agent.served() as port, linked(port, key=None) as operator:
        report = await operator.state(AgentState.READY)
        assert report.agent_id == "stock-2026-01-01T00:00:00.000000+00:00"
        operator.send(start(0))
        await operator.until(lambda: agent.told == ["/start", "/stop"])
        heard = len(operator.reports)
        await operator.until(lambda: len(operator.reports) > heard)
        assert {one.state for one in operator.reports} == {AgentState.READY}
        operator.send(start(0))
        await operator.state(AgentState.RUNNING)


@in_virtual_time
async def test_the_lease_of_an_agent_that_has_not_reported_is_not_renewed() -> None:
    """Check that no lease is renewed without a report: no one would be informed of its loss."""
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def link(request: web.Request) -> web.StreamResponse:
        channel = web.WebSocketResponse(autoping=False)
        await channel.prepare(request)
        await channel.send_str(encode_beat(Beat(1.0)))
        await channel.ping()
        assert (await channel.receive()).type is aiohttp.WSMsgType.PONG
        report = AgentReport("beating", AgentState.READY)
        await channel.send_str(encode_report(report))
        await channel.send_str(encode_beat(Beat(2.0)))
        async for message in channel:
            heard.put_nowait(message.data)
        return channel

    app = web.Application()
    app.router.add_get("/v1/link", link)
    async with loopback.serving(app) as port, linked(port, key=None):
        assert decode_command(await heard.get()) == Renewal(2.0)


class Deaf:
    """A machine that has died under its connections: they stay open, and nothing is said."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)


@in_virtual_time
async def test_a_port_that_never_answers_is_not_waited_for() -> None:
    deaf = Deaf()
    server = await asyncio.start_server(deaf.accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, linked(port) as operator:
        await until(lambda: len(deaf.writers), lambda count: count >= 10)
        assert (operator.reports, operator.losses) == ([], [])
        for writer in deaf.writers:
            writer.close()


@in_virtual_time
async def test_an_operator_waits_for_nothing_when_it_is_told_to_end() -> None:
    async with agent() as one:
        async with one.operator() as operator:
            await operator.state(AgentState.READY)
            began = now()
        assert now() - began < HEARTBEAT_SECONDS
        assert operator.losses == []
