"""Properties of the watchdog for any training, by generated examples."""

from __future__ import annotations

import pickle
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.watchdog.drive_watchdog import START, Drive
from unbroken.core.tick import Tick
from unbroken.core.watchdog.events import (
    Continued,
    Ended,
    Halted,
    PageRead,
    RankStarted,
    Sampled,
    WatchdogEvent,
    Wrote,
)
from unbroken.core.watchdog.machine import Watchdog
from unbroken.spec.job.detectors import DEFAULTS
from unbroken.wire.worker import Page

SEEDS = st.integers(0, 2**32)
few = settings(max_examples=15, deadline=None, derandomize=True)


@few
@given(SEEDS, st.floats(0.05, 20), st.floats(0, 3.9))
def test_no_alarm_while_signs_come_within_the_learned_rhythm(
    seed: int, step: float, more: float
) -> None:
    random, drive = Random(seed), Drive()
    drive.be(cores=random.choice((0.0, 0.3, 1.0, 4.0)), state="S")
    drive.steps(60, step)
    for _ in range(100):
        drive.step(step * random.uniform(0.5, 1 + more * (random.random() < 0.1)))
    assert not {name for name, _ in drive.raised} & {"silent", "spinning", "stuck"}


@few
@given(SEEDS, st.floats(0.05, 20), st.sampled_from([(0.0, "silent"), (1.0, "spinning")]))
def test_an_alarm_comes_in_time_after_all_signs_have_ceased(
    seed: int, step: float, kind: tuple[float, str]
) -> None:
    random, drive = Random(seed), Drive()
    drive.be(cores=1, state="R")
    for _ in range(max(40, int(100 / step))):
        drive.step(step * random.uniform(0.8, 1.2))
    allowed = drive.allowed
    assert allowed is not None
    drive.be(cores=kind[0])
    at = drive.now
    drive.wait(max(180, 5 * allowed))
    assert [name for name, _ in drive.raised] == [kind[1]]
    limit = 1.25 * allowed + 3 if kind[1] == "silent" else max(135, 3 * allowed + 3)
    assert drive.raised[0][1] + START - at <= limit


@few
@given(SEEDS, st.floats(0.05, 100))
def test_never_an_alarm_before_learning(seed: int, step: float) -> None:
    random, drive = Random(seed), Drive()
    for _ in range(random.randrange(5)):
        drive.step(step * random.uniform(0.1, 10))
    drive.be(random.choice((0.0, 0.3, 1.0)), random.choice((0.0, 1e6)), "S")
    drive.wait(595)
    assert not drive.raised


def _any_event(random: Random, now: float, page: list[int]) -> WatchdogEvent:
    page[0] += random.randrange(3)
    page[1] += random.random() < 0.1
    told = Page(
        step=page[0], calls=page[0], step_at=now - random.random(), visit=page[1], phase_at=now - 2
    )
    rank, state = random.randrange(4), random.choice("RSDTtZ")
    return random.choice(
        (
            RankStarted(rank),
            Ended(rank),
            Halted(rank),
            Continued(rank),
            Tick(),
            PageRead(rank, told),
            Wrote(rank, now, random.uniform(0, 9), random.randrange(3)),
            Sampled(rank, state, random.uniform(0, 99), random.randrange(10**9)),
        )
    )


@few
@given(SEEDS)
def test_any_events_leave_a_deadline_that_a_tick_moves_on(seed: int) -> None:
    random, now, page = Random(seed), START, [0, 0]
    dog = Watchdog(range(4), DEFAULTS)
    for _ in range(400):
        now += random.choice((0.0, 0.01, 0.3, 1.0, 50.0))
        turns, hits = dog.turns, dog.hits
        dog.step(_any_event(random, now, page), now)
        assert dog.turns >= turns
        assert dog.hits >= hits
        if (due := dog.deadline()) is not None and due <= now:
            dog.step(Tick(), now)
            after = dog.deadline()
            assert after is not None
            assert after > now
        assert all(alarm.at <= now for view in dog.views() for alarm in view.alarms)


def test_memory_and_looks_are_bounded() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    sizes = []
    for i in range(4):
        for j in range(25):
            drive.phase(f"phase {i} {j}")
            drive.steps(60, 1.0, loss=[2.0, 2.1])
        sizes.append(len(pickle.dumps(drive.dog)))
    assert sizes[-1] < 1.2 * sizes[0]
    assert sizes[-1] < 64_000
    assert drive.looks <= (drive.now - START) * 1.05 + 5
