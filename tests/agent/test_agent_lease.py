"""The lease on real workers: who renews it, and who ends them when nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import KEY, Running, linked, program, running, start
from tests.agent_requests import raw_link
from unbroken.agent.workers import keeper, lineage
from unbroken.agent.workers.keeper import send_lease
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.observation import CollectCommand

pytestmark = pytest.mark.slow

Story = Callable[[Path], Coroutine[Any, Any, None]]
LEASE = 8.0
"""The default: agents that wait 2 s for a processor of a busy machine keep it."""
CHANGES = 60
"""Reports that follow one another."""
LATE = 3.0
"""Seconds that a busy machine may be late; the tests distinguish seconds from many seconds."""


@contextlib.contextmanager
def agents(directory: Path, count: int) -> contextlib.AbstractContextManager[list[Running]]:
    """Agents of one job, each with one worker that lives for ever."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            place = directory / str(number)
            place.mkdir()
            worker = program(place, "import time\nprint('here', flush=True)\ntime.sleep(600)\n")
            found.append(stack.enter_context(running(place, worker, nproc=1)))
        yield found


async def started(given: list[Running], attempt: int = 0) -> list[AgentReport]:
    """Start an attempt on all of them, and let the operator go."""
    async with contextlib.AsyncExitStack() as stack:
        operators = [await stack.enter_async_context(linked(agent)) for agent in given]
        for rank, operator in enumerate(operators):
            parent = f"127.0.0.1:{given[0].port}" if rank else ""
            changes = {"rank": rank, "nnodes": len(given), "parent": parent}
            operator.send(start(attempt, lease_seconds=LEASE, **changes))
        reports = [await operator.workers(attempt) for operator in operators]
        # Renewed for longer than a lease, while the operator is there.
        began = time.monotonic()
        while time.monotonic() < began + LEASE + 1:
            for operator in operators:
                await operator.more(1)
        assert all(operator.reports[-1].state is AgentState.RUNNING for operator in operators)
        return reports


def lives(report: AgentReport) -> bool:
    try:
        os.kill(report.workers[0].pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ended_after(report: AgentReport) -> float:
    """Seconds until the only worker has ended."""
    began = time.monotonic()
    while lives(report):
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def workers_end_where_neither_operator_nor_peers_are_heard(directory: Path) -> None:
    with agents(directory, 2) as (first, second):
        one, other = await started([first, second])
        killed_at = time.monotonic()
        second.process.kill()
        assert await ended_after(other) < LATE
        await ended_after(one)
        assert LEASE - 2 < time.monotonic() - killed_at < LEASE + LATE
        report = first.report()
        assert (report.state, report.newest_attempt) == (AgentState.READY, 0)
        assert report.lease_seconds == LEASE


async def an_operator_that_is_away_stops_nothing(directory: Path) -> None:
    with agents(directory, 3) as given:
        reports = await started(given)
        await asyncio.sleep(3 * LEASE)
        assert all(map(lives, reports)), [agent.stderr.all() for agent in given]
        assert [agent.report().state for agent in given] == [AgentState.RUNNING] * 3


async def the_keeper_of_a_frozen_agent_ends_its_workers(directory: Path) -> None:
    with agents(directory, 2) as (first, second):
        one, other = await started([first, second])
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        assert await ended_after(one) < LEASE + LATE
        assert first.wait() == 137
        assert b"the lease on the workers has run out" in first.stderr.all()
        assert await ended_after(other) < LEASE + LATE


async def workers_end_while_the_whole_machine_is_stopped(directory: Path) -> None:
    with agents(directory, 2) as (first, second):
        one, other = await started([first, second])
        pid = one.workers[0].pid
        for number in (first.process.pid, one.pid, pid):
            os.kill(number, signal.SIGSTOP)
        try:
            began = time.monotonic()
            while not lineage.is_dying(pid):
                assert time.monotonic() < began + LEASE + LATE, "the kernel waits for a process"
                await asyncio.sleep(0.05)
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert first.wait() == 137
        assert b"the lease on the workers has run out" in first.stderr.all()
        assert await ended_after(other) < LEASE + LATE


async def an_agent_says_that_it_does_not_reach_its_parent(directory: Path) -> None:
    with agents(directory, 1) as (agent,), socket.socket() as parent:
        parent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{parent.getsockname()[1]}"
        async with linked(agent) as operator:
            operator.send(start(0, rank=1, nnodes=2, parent=address, lease_seconds=LEASE))
            await operator.report(lambda report: report.unreached == address)
            parent.listen()
            found = await operator.report(lambda report: not report.unreached)
            assert found.state is AgentState.RUNNING


STORIES = (
    an_agent_says_that_it_does_not_reach_its_parent,
    workers_end_where_neither_operator_nor_peers_are_heard,
    an_operator_that_is_away_stops_nothing,
    the_keeper_of_a_frozen_agent_ends_its_workers,
    workers_end_while_the_whole_machine_is_stopped,
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Story, Future[None]]]:
    """The stories, all of which have begun: each waits for leases to run out."""
    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {
            one: pool.submit(asyncio.run, one(tmp_path_factory.mktemp(one.__name__)))
            for one in STORIES
        }


@pytest.mark.parametrize("story", STORIES)
def test_the_lease_is_renewed_or_ends_the_workers(
    told: dict[Story, Future[None]], story: Story
) -> None:
    told[story].result()


async def test_a_spare_tells_which_agents_it_does_not_reach(tmp_path: Path) -> None:
    with agents(tmp_path, 2) as (spare, other), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        away, there = (f"127.0.0.1:{port}" for port in (closed.getsockname()[1], other.port))
        async with linked(spare) as operator:
            await operator.more(1)
            operator.send(CollectCommand(7, 3, 3.0, peers=(away, there)))
            await operator.until(lambda: bool(operator.evidence))
        answer = operator.evidence[0]
    assert (answer.request, answer.attempt, answer.ranks) == (7, 3, ())
    assert answer.unreached == (away,)


def test_the_newest_of_thousands_of_leases_counts() -> None:
    """A keeper that was stopped alone finds the renewals of minutes."""
    told, tells = os.pipe2(os.O_NONBLOCK)
    for until in range(5000):
        send_lease(tells, float(until))
    assert keeper._newest(told, 0.0) == 4999.0
    assert keeper._newest(told, 7.0) == 7.0
    send_lease(tells, None)
    assert keeper._newest(told, 7.0) == 0.0
    os.close(told)
    os.close(tells)


async def test_a_start_counts_only_where_an_operator_renews_the_lease(tmp_path: Path) -> None:
    with agents(tmp_path, 1) as (agent,):
        body = {"rank": 0, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29400}
        body |= {"faultCount": 0, "progress": {}, "ipVersion": None, "lease_seconds": LEASE}
        assert agent.request("POST", "/start", body)[0] == 200
        assert agent.report().state is AgentState.READY


async def test_an_agent_with_a_lease_does_not_ask_for_it_with_each_report(tmp_path: Path) -> None:
    with agents(tmp_path, 1) as (agent,):
        async with raw_link(agent.port, KEY) as link:
            body = {"rank": 0, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29400}
            body |= {"faultCount": 0, "progress": {}, "ipVersion": None, "lease_seconds": LEASE}
            agent.request("POST", "/start", body)
            began, kinds = time.monotonic(), Counter[str]()
            for attempt in range(CHANGES):
                agent.request("POST", "/stop", {"attempt": attempt})
                while f'"newest_attempt":{attempt},' not in (frame := await link.receive()):
                    kinds[json.loads(frame)["type"]] += 1
                kinds["report"] += 1
            seconds = time.monotonic() - began
    assert kinds["report"] >= CHANGES
    # Two a heartbeat of 1 s at most, and the first.
    assert 1 <= kinds["beat"] <= 3 + 2.5 * seconds
    assert kinds["beat"] < CHANGES / 2
