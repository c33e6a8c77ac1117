"""Findings of each detector, and their delays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.core.watchdog.drive_watchdog import START, Drive
from unbroken.core.tick import Tick
from unbroken.core.watchdog.events import (
    Continued,
    Ended,
    Halted,
    PageRead,
    RankStarted,
    Sample,
    Sampled,
    Wrote,
)
from unbroken.core.watchdog.levels import Finiteness
from unbroken.core.watchdog.machine import Watchdog
from unbroken.spec.job.detectors import DEFAULTS, Detector, Mode
from unbroken.wire.worker import Page

NAN = float("nan")


def trained(count: int = 400, seconds: float = 0.5, cores: float = 1.0) -> Drive:
    """Return a rank that has reported its steps for a while."""
    drive = Drive()
    drive.be(cores=cores, state="R")
    drive.steps(count, seconds)
    return drive


def test_a_stop_is_an_alarm_after_a_second_and_ends_with_the_continuation() -> None:
    drive = Drive()
    drive.wait(0.4)
    drive.be(state="T")
    drive.give(Halted(0))
    drive.wait(0.9)
    assert not drive.alarms
    drive.wait(0.2)
    assert drive.raised == [("stopped", pytest.approx(1.4))]
    turns = drive.dog.turns
    drive.give(Continued(0))
    assert not drive.alarms
    assert drive.dog.turns > turns


def test_a_stop_that_is_continued_at_once_is_none() -> None:
    drive = Drive()
    drive.give(Halted(0))
    drive.wait(0.8)
    drive.give(Continued(0))
    drive.wait(60)
    assert not drive.raised


def test_a_stop_below_the_worker_is_seen_in_samples() -> None:
    drive = trained(20)
    drive.be(state="T")
    drive.wait(8)
    assert drive.alarms == {"stopped"}
    drive.be(state="S")
    drive.wait(2)
    assert not drive.alarms


def test_a_continuation_that_was_not_told_is_seen_in_samples() -> None:
    drive = Drive()
    drive.give(Halted(0))
    drive.wait(1.0)
    drive.be(cores=1, state="R")
    drive.wait(8)
    assert not drive.alarms


def test_an_idle_silence_is_found_when_it_is_longer_than_allowed() -> None:
    drive = trained()
    allowed = drive.allowed
    assert allowed is not None
    assert 5 <= allowed <= 10
    drive.be()
    at = drive.now - START
    drive.wait(30)
    ((name, raised),) = drive.raised
    assert name == "silent"
    assert allowed <= raised - at <= 1.25 * allowed + 2
    (alarm,) = drive.dog.views()[0].alarms
    assert alarm.since == pytest.approx(at + START, abs=0.6)
    assert "no step" in alarm.why


def test_a_spinning_rank_needs_twice_the_silence() -> None:
    drive = trained()
    at, allowed = drive.now - START, drive.allowed or 0
    drive.wait(19)
    assert not drive.raised
    drive.wait(60)
    ((name, raised),) = drive.raised
    assert name == "spinning"
    assert raised - at >= 2 * allowed


def test_a_spin_is_one_on_a_node_that_is_busy_with_other_work() -> None:
    drive = trained()
    for i in range(150):
        drive.cores = 0.3 + 0.2 * (i % 2)
        drive.queued = 1 - drive.cores
        drive.wait(1)
    assert drive.alarms == {"spinning"}


def test_idleness_with_little_waiting_for_a_processor_is_no_spin() -> None:
    drive = trained()
    drive.be(cores=0.15)
    drive.queued = 0.2
    drive.wait(500)
    assert not drive.raised


@pytest.mark.parametrize(("cores", "rate"), [(0.3, 0), (1.0, 50_000), (0.0, 1e6)])
def test_a_silent_rank_that_works_is_left_alone_for_long(cores: float, rate: float) -> None:
    drive = trained()
    drive.be(cores, rate, "R")
    drive.wait(500)
    assert not drive.raised
    drive.wait(1000)
    assert drive.alarms == {"silent"}


def test_lines_between_steps_are_work_too() -> None:
    drive = trained()
    drive.be()
    for _ in range(100):
        drive.write(2)
    assert not drive.raised


def test_state_d_without_a_sign_is_found_in_ten_seconds() -> None:
    drive = Drive()
    drive.be(state="D")
    drive.wait(9)
    assert not drive.raised
    drive.wait(9)
    assert [name for name, _ in drive.raised] == ["stuck"]
    drive.be(cores=1, state="R")
    drive.wait(3)
    assert not drive.alarms


def test_state_d_of_a_rank_that_reads_is_a_slow_disk() -> None:
    drive = Drive()
    drive.be(rate=1e6, state="D")
    drive.wait(100)
    assert not drive.raised


def test_output_is_the_rhythm_of_a_rank_that_tells_no_steps() -> None:
    drive = Drive()
    drive.be(cores=1.5, rate=5000, state="R")
    for _ in range(100):
        drive.write(2)
    assert drive.dog.views()[0].step is None
    assert drive.allowed is not None
    drive.be()
    drive.wait(60)
    assert drive.alarms == {"silent"}
    drive.write(0)
    drive.wait(2)
    assert not drive.alarms


def test_work_is_the_rhythm_of_a_rank_that_shows_nothing() -> None:
    drive = Drive()
    drive.be(cores=2.5, rate=5000, state="R")
    for i in range(60):
        drive.be(cores=2.5 + i % 2, state="R")
        drive.wait(5)
    drive.be()
    drive.wait(120)
    assert drive.alarms == {"silent"}


def test_a_rank_that_shows_nothing_and_spins_is_never_judged() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.wait(3600)
    assert drive.allowed is None
    assert not drive.raised


def test_steps_that_take_twice_as_long_are_found_and_end() -> None:
    drive = trained(600)
    drive.steps(20, 1.0)
    assert not drive.raised
    drive.steps(50, 1.0)
    assert drive.alarms == {"slow"}
    drive.steps(60, 0.5)
    assert not drive.alarms


def phased(drive: Drive, count: int, seconds: float) -> None:
    """Make steps with two phases each."""
    for _ in range(count):
        drive.phase("data")
        drive.wait(0.2 * seconds)
        drive.phase("train")
        drive.step(0.8 * seconds)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 2.3])
def test_slowness_is_found_where_each_step_has_its_phases(seconds: float) -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    phased(drive, int(400 / seconds), seconds)
    assert not drive.raised
    phased(drive, int(120 / seconds), 2 * seconds)
    assert drive.alarms == {"slow"}
    phased(drive, int(120 / seconds), seconds)
    assert not drive.alarms


@pytest.mark.parametrize("pause", [1.0, 3.0, 8.0])
def test_slowness_is_found_where_a_phase_is_entered_often(pause: float) -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for round_ in range(120):
        drive.steps(8, 0.5 if round_ < 90 else 1.0)
        drive.phase("eval")
        # Evaluations that take longer and longer are no slow steps.
        drive.wait(pause * (1 + round_ / 60))
        drive.phase("train")
        assert "slow" not in drive.alarms or round_ >= 90
    assert drive.alarms == {"slow"}


def test_slowness_of_a_rank_that_only_prints_is_found() -> None:
    drive = Drive()
    drive.be(cores=1.5, rate=5000, state="R")
    for _ in range(240):
        drive.write(1)
    assert not drive.raised
    for _ in range(60):
        drive.write(2)
    assert drive.alarms == {"slow"}


@pytest.mark.parametrize("kind", [NAN, math.inf])
def test_metrics_that_are_not_finite_are_found_at_the_third(kind: float) -> None:
    drive = trained(100, 2.0)
    for _ in range(2):
        drive.step(2, {"loss": kind})
    drive.steps(3, 2.0)
    assert not drive.raised
    for _ in range(4):
        drive.step(2, {"loss": kind})
    assert drive.alarms == {"nan"}
    drive.steps(2, 2.0)
    assert not drive.alarms


def test_the_alarm_has_the_step_of_the_first_bad_value() -> None:
    drive = trained(100, 2.0)
    good = drive.page.step
    assert good is not None
    for _ in range(5):
        drive.step(2, {"loss": NAN})
    assert [alarm.step for alarm in drive.dog.views()[0].alarms] == [good + 1]


def test_the_first_bad_step_is_known_though_one_look_sees_many() -> None:
    finite = Finiteness()
    finite.add(Page(step=90, calls=9), Page(step=100, calls=19, bad_calls=4, metrics={"loss": NAN}))
    assert finite.step == 97


def test_mixed_precision_may_begin_with_infinite_gradients() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for _ in range(9):
        drive.step(1, {"loss": 2.0, "grad_norm": math.inf})
    drive.steps(60, 1)
    assert not drive.raised


def test_a_loss_that_leaves_its_range_is_found_and_one_outlier_is_not() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    drive.steps(200, 1.0, loss=[2.0, 2.1, 1.9, 2.05])
    drive.step(1, {"loss": 50.0})
    drive.steps(10, 1.0)
    assert not drive.raised
    drive.steps(8, 1.0, loss=[9.0])
    assert drive.alarms == {"spike"}
    drive.steps(6, 1.0)
    assert not drive.alarms


def test_a_checkpoint_is_missed_after_three_intervals() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for _ in range(4):
        drive.steps(100, 1.0)
        drive.save()
    drive.steps(295, 1.0)
    assert not drive.raised
    drive.steps(10, 1.0)
    assert drive.alarms == {"checkpoint"}
    drive.save()
    drive.wait(2)
    assert not drive.alarms


def test_times_that_differ_a_little_from_look_to_look_are_one_checkpoint() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    for _ in range(4):
        drive.steps(100, 1.0)
        drive.save()
        for i in range(50):
            at = (drive.page.checkpoint_at or 0) + (1 - 2 * (i % 2)) * 0.001
            drive.page = replace(drive.page, checkpoint_at=at)
            drive.step(1)
    drive.steps(300, 1.0)
    assert drive.alarms == set()
    drive.steps(120, 1.0)
    assert drive.alarms == {"checkpoint"}


def test_a_detector_that_is_off_finds_nothing_and_costs_no_looks() -> None:
    off = dict.fromkeys(Detector, Mode.OFF)
    drive = Drive(off)
    drive.be(cores=1, state="R")
    drive.steps(300)
    looks = drive.looks
    drive.be(state="T")
    drive.give(Halted(0))
    drive.wait(300)
    assert not drive.raised
    assert drive.looks - looks <= 301


def test_every_other_mode_finds_the_same() -> None:
    for mode in (Mode.SHADOW, Mode.WARN, Mode.ACT):
        drive = Drive(dict.fromkeys(Detector, mode))
        drive.give(Halted(0))
        drive.be(state="T")
        drive.wait(2)
        assert drive.alarms == {"stopped"}


def test_a_rank_that_has_ended_has_no_alarms_and_is_looked_at_no_more() -> None:
    drive = trained()
    drive.be()
    drive.wait(30)
    assert drive.alarms
    drive.give(Ended(0))
    assert not drive.alarms
    assert drive.dog.deadline() is None
    assert drive.dog.views()[0].step == 400


def test_nobody_is_blamed_while_others_save_at_the_end() -> None:
    drive = Drive(ranks=2)
    drive.be(cores=1, state="R")
    drive.steps(600)
    drive.give(Ended(1))
    drive.be()
    drive.wait(290)
    assert not drive.raised
    drive.wait(100)
    assert drive.alarms == {"silent"}


def test_a_new_start_forgets_what_was_learned() -> None:
    drive = trained()
    drive.page = Page()
    drive.give(RankStarted(0))
    drive.be()
    drive.wait(600)
    assert not drive.raised


def test_ranks_are_looked_at_together_and_strangers_ignored() -> None:
    dog = Watchdog(range(4, 8), DEFAULTS)
    assert dog.deadline() is None
    for i, rank in enumerate(range(4, 8)):
        assert dog.step(RankStarted(rank), START + i / 100) == []
    due = dog.deadline()
    assert due is not None
    assert dog.step(Tick(), due) == [Sample((4, 5, 6, 7))]
    for stray in (PageRead(9, Page()), Wrote(9, 1.0), Sampled(9, "T", 0.0), Halted(9), Ended(9)):
        assert dog.step(stray, due) == []
    dog.step(RankStarted(9), due)
    assert [view.rank for view in dog.views()] == [4, 5, 6, 7]


def test_views_say_phase_step_and_time() -> None:
    drive = Drive()
    drive.be(cores=1, state="R")
    assert drive.dog.views()[0].phase == "startup"
    drive.step(3)
    drive.wait(1)
    assert drive.dog.views()[0].phase == "first step"
    drive.steps(100)
    drive.wait(1)
    view = drive.dog.views()[0]
    assert (view.phase, view.step) == ("train", 101)
    assert view.step_seconds == pytest.approx(0.5)
    assert view.sign_at == view.step_at
    drive.phase("eval")
    hits, turns = drive.dog.hits, drive.dog.turns
    drive.wait(1)
    assert drive.dog.views()[0].phase == "eval"
    assert drive.dog.hits > hits
    assert drive.dog.turns > turns
