"""Inbox and Alarm: events in order, ticks in time, and all that waits before a late tick.

The clock is virtual: it jumps to the next timer, and `advance` lets the process stand still.
"""

from __future__ import annotations

import asyncio

from tests.virtual_time import advance, in_virtual_time
from unbroken.core.tick import Tick
from unbroken.runtime.drive import GLANCE_SECONDS, Alarm, Inbox

STOOD_STILL = 3 * GLANCE_SECONDS
SOON = 0.02


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


def inbox(deadline: float | None) -> Inbox[str]:
    return Inbox(lambda: deadline, now)


@in_virtual_time
async def test_events_come_in_their_order_and_before_a_deadline_that_has_passed() -> None:
    box = inbox(deadline=0.0)
    for event in ("a", "b"):
        box.put_nowait(event)
    assert [await anext(box) for _ in range(3)] == ["a", "b", Tick()]


@in_virtual_time
async def test_a_tick_comes_at_the_deadline_and_none_without_a_deadline() -> None:
    began = now()
    assert await anext(inbox(began + SOON)) == Tick()
    assert now() >= began + SOON
    box = inbox(deadline=None)
    asyncio.get_running_loop().call_later(SOON, box.put_nowait, "a")
    assert await anext(box) == "a"


@in_virtual_time
async def test_who_stood_still_hears_all_that_waits_before_it_is_ticked() -> None:
    loop, box = asyncio.get_running_loop(), inbox(now() + SOON)
    # Waiting messages take a few rounds of the loop to arrive.
    loop.call_soon(advance, STOOD_STILL)
    for round_trip in (2, 3):
        loop.call_later(STOOD_STILL + round_trip * SOON, box.put_nowait, "heard late")
    assert [await anext(box) for _ in range(3)] == ["heard late", "heard late", Tick()]


@in_virtual_time
async def test_a_machine_that_is_always_late_is_ticked() -> None:
    box = inbox(now() + SOON)
    late = asyncio.get_running_loop()

    def hold_up() -> None:
        advance(STOOD_STILL)
        late.call_later(SOON, hold_up)

    late.call_soon(hold_up)
    assert await anext(box) == Tick()


@in_virtual_time
async def test_a_clock_that_is_set_back_delays_no_tick() -> None:
    ahead = 3600.0

    def clock() -> float:
        return now() + ahead

    box: Inbox[str] = Inbox(lambda: due, clock)
    due = clock() + SOON
    asyncio.get_running_loop().call_soon(advance, STOOD_STILL)
    assert await anext(box) == Tick()
    ahead = 0.0
    due = clock() + SOON
    assert await anext(box) == Tick()
    assert due <= now() <= due + GLANCE_SECONDS


@in_virtual_time
async def test_put_waits_for_room() -> None:
    box: Inbox[str] = Inbox(lambda: None, now, most=1)
    await box.put("a")
    second = asyncio.ensure_future(box.put("b"))
    assert [await anext(box), await anext(box)] == ["a", "b"]
    await second


@in_virtual_time
async def test_an_alarm_rings_once_at_the_newest_deadline() -> None:
    rung: list[float] = []
    ringing = asyncio.Event()

    def ring() -> None:
        rung.append(now())
        ringing.set()

    alarm, began = Alarm(now, ring), now()
    alarm.set(began)
    alarm.set(began + SOON)
    await ringing.wait()
    assert rung[0] >= began + SOON
    alarm.set(began)
    alarm.set(None)
    later = asyncio.Event()
    Alarm(now, later.set).set(now() + SOON)
    await later.wait()
    assert len(rung) == 1


@in_virtual_time
async def test_who_stood_still_hears_all_that_waits_before_its_alarm_rings() -> None:
    loop, heard, over = asyncio.get_running_loop(), list[str](), asyncio.Event()

    def ring() -> None:
        heard.append("alarm")
        over.set()

    alarm = Alarm(now, ring)
    due = now() + SOON
    alarm.set(due)
    loop.call_soon(advance, STOOD_STILL)

    def hear() -> None:
        heard.append("event")
        alarm.set(due)

    for round_trip in (2, 3):
        loop.call_later(STOOD_STILL + round_trip * SOON, hear)
    await over.wait()
    assert heard == ["event", "event", "alarm"]
