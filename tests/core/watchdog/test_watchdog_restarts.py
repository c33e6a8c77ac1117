"""Knowledge that an attempt passes to the next one, and findings while little was learned."""

from __future__ import annotations

import pytest

from tests.core.watchdog.drive_watchdog import START, Drive


def restarted(start_seconds: float = 20.0, count: int = 400) -> Drive:
    """Return a rank in its second attempt, which has just started."""
    drive = Drive()
    drive.be(cores=1, rate=5000, state="R")
    drive.wait(start_seconds)
    drive.steps(count)
    drive.restart()
    return drive


def test_a_hang_soon_after_a_restart_is_found() -> None:
    drive = restarted()
    drive.wait(20)
    drive.steps(6)
    assert drive.allowed is not None
    drive.be()
    drive.wait(15)
    assert drive.alarms == {"silent"}
    assert drive.allowed <= 10.5


def test_a_hang_in_the_start_up_after_a_restart_is_found() -> None:
    drive = restarted()
    assert drive.dog.views()[0].phase == "startup"
    drive.wait(15)
    drive.be()
    drive.wait(115)
    assert not drive.raised
    drive.wait(10)
    assert drive.alarms == {"silent"}
    drive.be(cores=1, rate=5000, state="R")
    drive.steps(1)
    drive.wait(2)
    assert not drive.alarms


def test_a_hang_in_the_first_steps_after_a_restart_is_found() -> None:
    drive = restarted()
    drive.wait(20)
    drive.steps(2)
    drive.be()
    drive.wait(115)
    assert not drive.raised
    drive.wait(15)
    assert drive.alarms == {"silent"}


def test_a_long_start_up_is_given_five_times_as_long_after_a_restart() -> None:
    drive = restarted(200)
    drive.be()
    drive.wait(1000)
    assert not drive.raised
    drive.wait(60)
    assert drive.alarms == {"silent"}


@pytest.mark.parametrize(("cores", "rate"), [(0.5, 0), (1.0, 1e6), (0.0, 1e6)])
def test_a_start_up_that_works_may_take_as_long_as_it_likes(cores: float, rate: float) -> None:
    drive = restarted()
    drive.be(cores, rate, "R")
    drive.wait(7200)
    assert not drive.raised


def test_lines_in_the_start_up_end_its_silence() -> None:
    drive = restarted()
    drive.be()
    for _ in range(20):
        drive.write(100)
    assert not drive.raised
    drive.wait(130)
    assert drive.alarms == {"silent"}
    drive.write(0)
    drive.wait(2)
    assert not drive.alarms


def test_a_start_up_that_never_ended_teaches_nothing() -> None:
    drive = restarted(20, 2)
    drive.be()
    drive.wait(595)
    assert not drive.raised


def test_an_attempt_that_ends_in_its_start_up_loses_nothing_that_was_known() -> None:
    drive = restarted()
    drive.wait(5)
    drive.restart()
    drive.wait(20)
    drive.steps(6)
    drive.be()
    drive.wait(15)
    assert drive.alarms == {"silent"}


def test_phases_that_were_learned_are_known_after_a_restart() -> None:
    drive = Drive()
    drive.be(cores=1, rate=5000, state="R")
    for _ in range(4):
        drive.steps(100)
        drive.phase("eval")
        drive.wait(30)
        drive.phase("train")
    drive.restart()
    drive.wait(10)
    drive.steps(20)
    drive.phase("eval")
    drive.wait(60)
    assert not drive.raised
    assert (drive.allowed or 0) >= 120
    drive.be()
    drive.wait(300)
    assert drive.alarms == {"silent"}


def test_floors_are_higher_again_after_a_restart() -> None:
    drive = restarted(20, 4000)
    drive.wait(20)
    drive.steps(6)
    assert drive.allowed == pytest.approx(10, abs=0.5)
    drive.steps(2400)
    assert drive.allowed is not None
    assert drive.allowed < 6


def printed(count: int, seconds: float = 2.0) -> Drive:
    """Return a rank that only prints, in its second attempt."""
    drive = Drive()
    drive.be(cores=1.5, rate=5000, state="R")
    drive.wait(20)
    for _ in range(count):
        drive.write(seconds)
    drive.restart()
    return drive


def test_a_rank_that_only_prints_is_known_after_a_restart() -> None:
    drive = printed(100)
    drive.wait(60)
    assert not drive.raised
    assert drive.dog.views()[0].phase == "startup"
    for _ in range(14):
        drive.write(2)
    drive.be()
    drive.wait(40)
    assert drive.alarms == {"silent"}


def test_a_rank_that_only_prints_is_given_a_start_up_after_a_restart() -> None:
    drive = printed(100)
    drive.be()
    drive.wait(220)
    assert not drive.raised
    drive.wait(60)
    assert drive.alarms == {"silent"}


def test_a_few_lines_teach_the_next_attempt_nothing() -> None:
    drive = printed(5)
    drive.be()
    drive.wait(595)
    assert not drive.raised


def test_a_long_silence_after_a_few_steps_is_found_without_a_rhythm() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.wait(30)
    drive.steps(7, 1.0)
    assert drive.allowed is None
    at = drive.now - START
    drive.be()
    drive.wait(118)
    assert not drive.raised
    assert drive.allowed is None
    drive.wait(10)
    assert [name for name, _ in drive.raised] == ["silent"]
    assert drive.raised[0][1] - at >= 120
    assert drive.allowed == 120


def test_a_slow_first_step_makes_the_bound_without_a_rhythm_longer() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.steps(1, 1.0)
    drive.steps(1, 60.0)
    drive.steps(6, 1.0)
    drive.be()
    drive.wait(595)
    assert not drive.raised
    drive.wait(20)
    assert drive.alarms == {"silent"}


def test_four_signs_make_no_bound_nor_do_those_of_another_phase() -> None:
    for is_told in (True, False):
        drive = Drive()
        drive.be(cores=1, state="R")
        drive.steps(20 if is_told else 4, 1.0)
        if is_told:
            drive.phase("eval")
        drive.be()
        drive.wait(1790 if is_told else 595)
        assert not drive.raised


def test_an_attempt_does_not_change_what_it_was_taught() -> None:
    drive = restarted()
    before = drive.dog
    drive.restart()
    gaps = before.taught()[0].phases["train"].gaps
    drive.wait(20)
    drive.steps(50)
    assert drive.dog.taught()[0].phases["train"].gaps > gaps
    assert before.taught()[0].phases["train"].gaps == gaps
