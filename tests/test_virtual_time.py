"""The virtual clock: it jumps over waits, and over nothing that happens."""

from __future__ import annotations

import asyncio
import os
import threading

from tests.virtual_time import VirtualLoop, advance, in_virtual_time


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_wait_takes_its_time_and_timers_come_in_order() -> None:
    began, order = now(), list[str]()
    loop = asyncio.get_running_loop()
    loop.call_later(7200, order.append, "late")
    loop.call_later(60, order.append, "early")
    await asyncio.sleep(86_400)
    assert (order, round(now() - began, 3)) == (["early", "late"], 86_400)


@in_virtual_time
async def test_no_time_passes_while_a_thread_works() -> None:
    began, is_free = now(), threading.Event()
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(None, is_free.wait)
    late = loop.call_later(1, is_free.set)
    # Time cannot pass, so the timer cannot free the thread.
    threading.Thread(target=is_free.set).start()
    assert await work
    assert now() == began
    await asyncio.sleep(1)
    assert late.when() <= now()


@in_virtual_time
async def test_a_message_between_sockets_comes_before_a_timer() -> None:
    received = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()
        received.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        began = now()
        for _ in range(50):
            writer.write(os.urandom(10))
            async with asyncio.timeout(5):
                await reader.readexactly(10)
        assert now() == began
        writer.close()
        await received.wait()


@in_virtual_time
async def test_a_stop_of_the_process_is_time_without_a_turn() -> None:
    began, turns = now(), list[float]()
    loop = asyncio.get_running_loop()
    loop.call_later(1, lambda: turns.append(now()))
    advance(100)
    assert turns == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turns == [began + 100]


def test_each_test_begins_at_the_same_time() -> None:
    first, second = VirtualLoop(), VirtualLoop()
    assert first.time() == second.time()
    first.close()
    second.close()
