"""Lateness of a rank, which is noticed long before a silence is judged by time alone."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.watchdog.drive_watchdog import Drive
from unbroken.wire.observation import Bound, RankWatch

few = settings(max_examples=25, deadline=None, derandomize=True)


def view(drive: Drive) -> RankWatch:
    """Return the view of the rank."""
    return drive.dog.views()[0]


def late_after(drive: Drive, longest: float = 700.0) -> float:
    """Return the seconds of silence until the rank is late; it ends by `longest`."""
    began = drive.now
    while view(drive).late_since is None and drive.now - began < longest:
        drive.wait(0.25)
    return drive.now - began


@few
@given(st.integers(0, 2**32), st.floats(0.02, 30))
def test_after_twenty_steps_a_rank_is_late_within_five_seconds_or_three_steps(
    seed: int, step: float
) -> None:
    random, drive = Random(seed), Drive()
    drive.be(cores=1, state="R")
    for _ in range(max(24, int(5 / step))):
        drive.step(step * random.uniform(0.8, 1.2))
    assert view(drive).late_since is None
    assert view(drive).bound == Bound.STEPS.value
    drive.be(cores=random.choice((0.0, 1.0, 0.3)))
    seconds = late_after(drive)
    assert 2.4 <= seconds <= max(5.0, 3.2 * step + 1.5)
    assert 5.0 <= (view(drive).act_seconds or 0) <= max(5.0, 5 * step)


@few
@given(st.integers(0, 2**32), st.floats(0.2, 5))
def test_after_thirty_seconds_of_lines_a_rank_is_late_within_twenty(seed: int, gap: float) -> None:
    random, drive = Random(seed), Drive()
    drive.be(cores=0.05)
    for _ in range(int(32 / gap) + 1):
        drive.write(gap * random.uniform(0.9, 1.1))
    drive.wait(1.5)
    assert view(drive).bound == Bound.OUTPUT.value
    assert 8 <= late_after(drive) <= 20


@pytest.mark.parametrize("cores", [0.0, 1.0])
def test_a_rank_that_tells_nothing_is_late_within_two_minutes(cores: float) -> None:
    drive = Drive()
    for _ in range(60):
        drive.be(cores=2.0, rate=1e6, state="R")
        drive.wait(3)
    drive.be(cores=cores)
    assert late_after(drive) <= 120
    assert view(drive).bound == Bound.WORK.value


@pytest.mark.parametrize(("history", "idle"), [(90, 75), (180, 52), (600, 37), (1200, 34)], ids=str)
def test_a_rank_that_shows_nothing_is_late_sooner_the_longer_it_was_seen_to_work(
    history: int, idle: float
) -> None:
    """Hold the figures of docs/detectors.md: what keeps such a hang from 30 s."""
    for cores, expected in ((0.0, idle), (1.0, 66.0)):
        drive = Drive()
        for part in range(history // 3):
            drive.be(cores=2.0 if part % 2 else 1.3, rate=1e6, state="R")
            drive.wait(3)
        drive.be(cores=cores)
        assert late_after(drive) == pytest.approx(expected, abs=1.5)


def test_a_sign_ends_it_at_once() -> None:
    drive = Drive()
    drive.steps(40)
    late_after(drive)
    drive.step(0)
    drive.wait(1.2)
    assert view(drive).late_since is None


def test_a_pause_that_came_before_makes_a_certain_look_wait_longer() -> None:
    drive = Drive()
    drive.steps(40)
    drive.step(40)
    drive.steps(40)
    assert (view(drive).act_seconds or 0) >= 50
    assert late_after(drive) <= 12, "a look is due nevertheless"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_start_up_and_a_new_phase_are_not_late(is_first: bool) -> None:
    drive = Drive()
    drive.be()
    if not is_first:
        drive.steps(40)
        drive.phase("eval")
    assert late_after(drive, 590) >= 590
    assert view(drive).bound == Bound.START.value


def test_lateness_costs_no_more_looks_and_few_reports() -> None:
    drive = Drive()
    drive.be(cores=1.0, state="S")
    drive.wait(300)
    looks, turns = drive.looks, drive.dog.turns
    drive.wait(300)
    assert drive.looks - looks <= 320
    assert drive.dog.turns - turns <= 2
