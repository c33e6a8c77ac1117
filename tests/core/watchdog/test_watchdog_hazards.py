"""Activity that looks like a hang but is none, and false alarms that learning ends."""

from __future__ import annotations

import pytest

from tests.core.watchdog.drive_watchdog import Drive
from unbroken.core.watchdog.events import Continued, Halted


def trained(count: int = 1200, seconds: float = 0.5) -> Drive:
    """Return a rank that trains as on a GPU."""
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.steps(count, seconds)
    return drive


def idle(drive: Drive, seconds: float) -> None:
    """Show nothing at all for a time, then train again."""
    drive.be()
    drive.wait(seconds)
    drive.be(cores=1, state="R")


def test_start_up_and_first_steps_may_take_ten_minutes_each() -> None:
    drive = Drive()
    idle(drive, 590)
    for _ in range(3):
        drive.step(0)
        idle(drive, 590)
    assert not drive.raised


def test_a_start_up_without_any_sign_has_an_upper_bound() -> None:
    drive = Drive()
    idle(drive, 700)
    assert [name for name, _ in drive.raised] == ["silent"]
    assert 600 <= drive.raised[0][1] <= 610
    drive.step(0)
    drive.wait(2)
    assert not drive.alarms


def test_a_start_up_that_works_has_none() -> None:
    drive = Drive()
    drive.be(cores=1.0, rate=1e6, state="R")
    drive.wait(7200)
    assert not drive.raised


def test_a_first_step_that_compiles_does_not_widen_what_is_allowed_later() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.step(5)
    drive.step(300)
    drive.steps(600)
    assert drive.allowed is not None
    assert drive.allowed < 10


def test_a_recurring_pause_becomes_part_of_the_rhythm() -> None:
    drive = trained()
    idle(drive, 4)
    drive.steps(100)
    for pause in (6, 12, 20, 30, 45):
        idle(drive, pause)
        drive.steps(100)
    assert not drive.raised


def test_a_false_alarm_ends_with_the_next_sign_and_comes_once() -> None:
    drive = trained()
    for _ in range(5):
        idle(drive, 20)
        drive.steps(50)
        assert not drive.alarms
    assert [name for name, _ in drive.raised] == ["silent"]
    assert drive.allowed is not None
    assert drive.allowed > 80


def test_a_told_phase_may_take_long_when_it_is_first_seen() -> None:
    drive = trained()
    drive.phase("eval")
    idle(drive, 900)
    drive.phase("train")
    drive.steps(100)
    assert not drive.raised


def test_a_told_phase_is_judged_by_its_earlier_visits() -> None:
    drive = trained()
    for seconds in (20, 35, 25, 30):
        drive.phase("eval")
        idle(drive, seconds)
        drive.phase("train")
        drive.steps(100)
    allowed = drive.allowed
    assert allowed is not None
    assert allowed < 10, "evaluation is no part of training's rhythm"
    drive.phase("eval")
    idle(drive, 120)
    assert not drive.raised
    idle(drive, 300)
    assert drive.alarms == {"silent"}
    drive.phase("train")
    drive.wait(1)
    assert not drive.alarms


def test_more_phases_than_are_kept_share_a_place() -> None:
    drive = trained()
    for i in range(200):
        drive.phase(f"phase {i}")
        drive.steps(3)
    assert drive.dog.views()[0].phase == "phase 199"
    assert not drive.raised


@pytest.mark.parametrize("seconds", [3, 60, 100_000])
def test_a_frozen_machine_is_no_silence_of_its_ranks(seconds: float) -> None:
    drive = trained()
    before = drive.allowed
    drive.freeze(seconds)
    drive.steps(100)
    assert not drive.raised
    assert before is not None
    assert drive.allowed == pytest.approx(before, rel=0.6), "nor is it learned"


def test_a_hang_is_found_after_a_freeze_too() -> None:
    drive = trained()
    drive.be()
    drive.freeze(60)
    drive.wait(20)
    assert drive.alarms == {"silent"}


def test_a_stop_by_a_person_is_not_learned() -> None:
    drive = trained()
    before = drive.allowed
    drive.be(state="T")
    drive.give(Halted(0))
    drive.wait(500)
    drive.be(cores=1, state="R")
    drive.give(Continued(0))
    drive.steps(4)
    drive.wait(1)
    assert not drive.alarms
    after = drive.allowed
    assert before is not None
    assert after is not None
    assert after < 3 * before


def test_a_script_that_talks_at_the_start_and_then_once_an_epoch() -> None:
    drive = Drive()
    drive.be(cores=1, rate=1e5, state="R")
    for _ in range(60):
        drive.write(3)
    drive.be(cores=1, state="R")
    for _ in range(12):
        drive.write(600)
    assert not drive.raised


def test_a_bar_that_writes_ten_times_a_second_costs_no_more_looks() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for _ in range(3000):
        drive.write(0.1)
    assert drive.looks <= 301
    assert not drive.raised


def test_slowness_that_ends_is_none() -> None:
    drive = trained(2000)
    for _ in range(5):
        drive.steps(25, 1.0)
        drive.steps(100, 0.5)
    assert not drive.raised


def test_a_pause_every_few_steps_is_no_slowness() -> None:
    drive = trained(600)
    for _ in range(40):
        drive.steps(20)
        drive.step(8)
    assert "slow" not in {name for name, _ in drive.raised}


def test_steps_that_grow_slowly_are_no_slowness() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for i in range(4000):
        drive.step(0.5 * (1 + i / 2000))
    assert not drive.raised


def test_a_new_level_is_accepted_in_the_end() -> None:
    drive = trained(400)
    drive.steps(4000, 1.0)
    assert [name for name, _ in drive.raised] == ["slow"]
    assert not drive.alarms


def test_slower_steps_bring_later_checkpoints() -> None:
    drive = trained(10)
    for _ in range(4):
        drive.steps(100, 1.0)
        drive.save()
    drive.steps(199, 4.0)
    assert "checkpoint" not in {name for name, _ in drive.raised}
