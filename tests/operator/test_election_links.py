"""Commands to agents wait for leave, over both ways of talking to them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from tests import loopback
from tests.apiservers import Cluster
from tests.watching import Watcher, running
from unbroken.agent_http.client import AgentLink, LinkResources
from unbroken.core.nodes.repair.events import Answer, RepairOrder
from unbroken.errors import WorldError
from unbroken.kube.client import connect
from unbroken.operator.election import Mandate
from unbroken.operator.nodes.providers.command import CommandProvider
from unbroken.spec.nodes.values import Action
from unbroken.wire.agent import (
    LINK_PATH,
    AgentReport,
    AgentState,
    Command,
    StartCommand,
    StopCommand,
)
from unbroken.wire.agent_codec import decode_command, encode_report

REPORT = AgentReport(agent_id="a", state=AgentState.READY)


class Agent:
    """Records its commands and questions, with the protocol of the stock agent or of ours."""

    def __init__(self, is_stock: bool) -> None:
        self.commands: Watcher[str] = Watcher()
        self.questions: Watcher[str] = Watcher()
        self._is_stock = is_stock

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve; yield the port."""
        app = web.Application()
        if not self._is_stock:
            app.router.add_get(LINK_PATH, self._link)
        app.router.add_get("/status", self._status)
        app.router.add_post("/{what}", self._post)
        async with loopback.serving(app) as port:
            yield port

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(encode_report(REPORT))
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            command = decode_command(message.data)
            self.commands("start" if isinstance(command, StartCommand) else "stop")
        return socket

    async def _status(self, request: web.Request) -> web.Response:
        self.questions("status")
        return web.json_response({"status": "ready", "agent_version": "1"})

    async def _post(self, request: web.Request) -> web.Response:
        self.commands(request.match_info["what"])
        return web.json_response({})


@pytest.mark.parametrize("is_stock", [False, True], ids=["linked", "stock"])
async def test_a_command_waits_for_leave_and_the_newest_goes_out(is_stock: bool) -> None:
    start: Command = StartCommand(
        attempt=1, rank=0, nnodes=1, master_addr="127.0.0.1", master_port=1
    )
    agent, now, told = Agent(is_stock), 100.0, Watcher[AgentReport]()
    mandate = Mandate(10.0, lambda: now)
    async with agent.serve() as port:
        shared = LinkResources(permit=mandate)
        link = AgentLink("127.0.0.1", port, None, told, lambda why: None, shared=shared)
        async with running(link.run()):
            await told.until(lambda seen: len(seen) >= 1)
            link.send(StopCommand(0))
            # The agent's reports still arrive, and it is asked as often as before.
            asked = 3 if is_stock else 0
            await agent.questions.until(lambda seen: len(seen) >= asked)
            assert len(agent.questions.seen) <= asked + 1, "who waits does not ask the more"
            link.send(start)
            mandate.renewed(now)
            await agent.commands.until(lambda seen: len(seen) >= 1)
            assert agent.commands.seen == ["start"], "what was held back is out of date"
            now += 10.0
            link.send(StopCommand(1))
            link.send(start)
            mandate.renewed(now)
            await agent.commands.until(lambda seen: len(seen) >= 2)
    assert agent.commands.seen == ["start", "start"]


async def test_a_command_of_the_users_is_not_called_without_leave(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    called = tmp_path / "called"
    order = RepairOrder("absent", Action.REPLACE, "boot", "o")

    async def check() -> None:
        async with connect(clusters("embedded").kubeconfig) as client:
            for may_write in (False, True):
                guarded = client.guarded(lambda given=may_write: given)
                provider = CommandProvider(guarded, ["touch", str(called)])
                if may_write:
                    assert (await provider.order(order)).answer is Answer.DONE
                    return
                with pytest.raises(WorldError, match="not certain"):
                    await provider.order(order)
                assert not called.exists()

    await check()
    assert called.exists()
