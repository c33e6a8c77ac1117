"""Thousands of links take turns in connecting, and nobody waits for those that are cut off."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from unbroken.agent_http.client import Turns
from unbroken.kube.clock import pause

MOST = 3


async def test_no_more_connect_at_a_time_than_may_and_all_come_in_order() -> None:
    turns = Turns(MOST)
    under_way: set[int] = set()
    order: list[int] = []

    async def connect(number: int) -> None:
        async with turns.turn():
            under_way.add(number)
            order.append(number)
            assert len(under_way) <= MOST
            await pause(0)
            under_way.remove(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(connect(number))
    assert order == list(range(20))


async def test_those_that_get_no_answer_make_room_for_others() -> None:
    turns, never = Turns(MOST), asyncio.Event()
    held = 0

    async def connect() -> None:
        nonlocal held
        async with turns.turn():
            held += 1
            await never.wait()

    async with asyncio.TaskGroup() as tasks:
        stuck = [tasks.create_task(connect()) for _ in range(2 * MOST)]
        await pause(0)
        assert held == MOST
        async with turns.turn():
            assert held == 2 * MOST, "they came first"
        for task in stuck:
            task.cancel()
    # None was lost, and none was given back twice.
    async with AsyncExitStack() as stack:
        for _ in range(MOST):
            await stack.enter_async_context(turns.turn())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), turns.turn():
                pass
