"""The lease on the workers, and who renews it: an operator, or all agents of the attempt together.

In virtual time; in test_agent_lease_processes.py leases of real workers run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.agent.running import KEY, start
from tests.agent.virtual_agents import Agent, Wire, agent
from tests.agent_requests import AgentRequests, raw_link
from tests.virtual_time import advance, in_virtual_time
from unbroken.wire.agent import AgentState

LEASE = 8.0
CHANGES = 60
"""Reports that follow one another."""
BODY = {
    "rank": 0, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29400, "faultCount": 0,
    "progress": {}, "ipVersion": None, "lease_seconds": LEASE,
}  # fmt: skip


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def attempt(count: int) -> AsyncIterator[tuple[list[Agent], Wire]]:
    """Run an attempt whose operator leaves after two leases; the wire leads to the first agent."""
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(agent(1)) for _ in range(count)]
        wire = await stack.enter_async_context(found[0].wire())
        async with contextlib.AsyncExitStack() as links:
            operators = [await links.enter_async_context(one.operator()) for one in found]
            for rank, operator in enumerate(operators):
                parent = f"127.0.0.1:{wire.port}" if rank else ""
                operator.send(start(rank=rank, nnodes=count, parent=parent, lease_seconds=LEASE))
                await operator.workers(0)
            await asyncio.sleep(2 * LEASE)
            assert all(one.workers.alive for one in found), "the operator renews their leases"
        yield found, wire


async def post(one: Agent, path: str, body: dict[str, Any]) -> int:
    """Send a request in a thread; return the status of the answer."""

    def send() -> int:
        with contextlib.closing(AgentRequests("127.0.0.1", one.port, KEY)) as requests:
            return requests.request("POST", path, json.dumps(body).encode(), {})[0]

    return await asyncio.to_thread(send)


@in_virtual_time
async def test_an_operator_that_is_away_stops_nothing() -> None:
    async with attempt(3) as (found, _):
        await asyncio.sleep(3 * LEASE)
        assert all(one.workers.alive for one in found)
        assert {one.report().state for one in found} == {AgentState.RUNNING}


@pytest.mark.parametrize("how", ["cut", "hold"])
@in_virtual_time
async def test_workers_end_where_neither_operator_nor_peers_are_heard(how: str) -> None:
    async with attempt(2) as (found, wire):
        await asyncio.sleep(LEASE)
        cut_at = now()
        wire.cut() if how == "cut" else wire.hold()
        while all(one.workers.alive for one in found):
            await asyncio.sleep(0.1)
        # Peers vouch for the time of a question, and ask each half second.
        assert now() - cut_at > LEASE - 2
        await asyncio.sleep(max(0.0, cut_at + LEASE + 0.1 - now()))
        for one in found:
            report = one.report()
            assert (one.workers.alive, report.state) == ({}, AgentState.READY)
            assert (report.newest_attempt, report.lease_seconds) == (0, LEASE)


@in_virtual_time
async def test_workers_end_after_a_suspension_that_was_longer_than_their_lease() -> None:
    async with attempt(2) as (found, _):
        advance(2 * LEASE)
        await asyncio.sleep(1)
        assert [one.workers.alive for one in found] == [{}, {}]


@in_virtual_time
async def test_an_agent_says_that_it_does_not_reach_its_parent() -> None:
    async with agent(1) as one, one.operator() as operator:
        with socket.socket() as parent:
            parent.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{parent.getsockname()[1]}"
            operator.send(start(rank=1, nnodes=2, parent=address, lease_seconds=LEASE))
            await operator.report(lambda report: report.unreached == address)
            parent.listen()
            found = await operator.report(lambda report: not report.unreached)
            assert found.state is AgentState.RUNNING


@in_virtual_time
async def test_a_start_counts_only_where_an_operator_renews_the_lease() -> None:
    async with agent(1) as one:
        assert await post(one, "/start", BODY) == 200
        assert one.report().state is AgentState.READY


@in_virtual_time
async def test_an_agent_with_a_lease_does_not_ask_for_it_with_each_report() -> None:
    async with agent(1) as one, raw_link(one.port, KEY) as link:
        await post(one, "/start", BODY)
        began, kinds = now(), Counter[str]()
        for number in range(CHANGES):
            await post(one, "/stop", {"attempt": number})
            while f'"newest_attempt":{number},' not in (frame := await link.receive()):
                kinds[json.loads(frame)["type"]] += 1
            kinds["report"] += 1
        assert now() - began < 1
    assert kinds["report"] >= CHANGES
    assert kinds["beat"] == 1
