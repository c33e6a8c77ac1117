"""The budget of the page's server: 5 % of the processor for all pages together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from tests.watching import PATIENCE_SECONDS
from unbroken.cli.page import turns as turns_module
from unbroken.cli.page.turns import Clock, Turns


@dataclass
class Time:
    """A clock that goes on when somebody waits or works."""

    now: float = 0.0
    used: float = 0.0
    began: list[tuple[str, float]] = field(default_factory=list)

    async def pause(self, seconds: float) -> None:
        self.now += seconds

    def turns(self) -> Turns:
        return Turns(Clock(lambda: 0.0, lambda: self.now, self.pause, lambda: self.used))

    async def work(self, turns: Turns, name: str, seconds: float) -> None:
        async with turns.turn():
            self.began.append((name, self.now))
            self.now += seconds
            self.used += seconds


async def test_work_has_its_turn_in_order_and_takes_a_twentieth_of_the_time() -> None:
    time = Time()
    turns = time.turns()
    await asyncio.gather(*(time.work(turns, name, 0.1) for name in "abc"))
    assert [name for name, _ in time.began] == ["a", "b", "c"]
    assert [at for _, at in time.began] == pytest.approx([0.0, 2.1, 4.2])


async def test_a_wait_for_the_cluster_costs_nothing() -> None:
    time = Time()
    turns = time.turns()
    async with turns.turn():
        time.now += 30.0
    await time.work(turns, "next", 0.1)
    assert time.began == [("next", 30.0)]


async def test_a_long_wait_for_the_cluster_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert turns_module.HOLD_SECONDS == 1.0
    monkeypatch.setattr(turns_module, "HOLD_SECONDS", 0.0)
    turns, others = Time().turns(), asyncio.Event()

    async def other() -> None:
        async with turns.turn():
            others.set()

    async with turns.turn(), asyncio.TaskGroup() as tasks:
        tasks.create_task(other())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await others.wait()
    assert not turns._turn.locked()


async def test_what_a_person_does_not_wait_for_is_paid_by_later_turns() -> None:
    time = Time()
    turns = time.turns()
    for _ in range(2):
        with turns.at_once():
            time.now += 0.1
            time.used += 0.1
    assert time.now == pytest.approx(0.2)
    await time.work(turns, "later", 0.0)
    assert [at for _, at in time.began] == pytest.approx([4.1])


async def test_work_at_the_same_time_is_charged_once() -> None:
    time = Time()
    turns = time.turns()
    with turns.at_once():
        time.used += 1.0
        with turns.at_once():
            time.used += 1.0
        time.used += 1.0
    time.used += 5.0  # by others
    await time.work(turns, "next", 0.0)
    assert time.began == [("next", 60.0)]


async def test_work_that_fails_is_charged_and_ends_its_turn() -> None:
    time = Time()
    turns = time.turns()
    with pytest.raises(ValueError, match="odd"):
        async with turns.turn():
            time.used += 1.0
            raise ValueError("odd")
    await time.work(turns, "next", 0.0)
    assert time.began == [("next", 20.0)]
