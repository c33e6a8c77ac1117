"""The past of a job's training: bounded, whole, and honest about restarts."""

from __future__ import annotations

import math
from itertools import pairwise

from unbroken.core.page.history import METRICS_MAX, NAME_CHARACTERS, POINTS_MAX, MetricHistory
from unbroken.wire.observation import RankWatch


def test_the_past_is_whole_and_bounded() -> None:
    history = MetricHistory(2.0)
    for second in range(0, 40_000, 2):
        history.add(float(second), [RankWatch(0, step=second * 3)])
    times = [one.at for one in history.points]
    assert len(times) <= POINTS_MAX
    assert times[0] == 0.0
    assert times[-1] >= 39_000.0
    assert {round(after - before) for before, after in pairwise(times)} == {128}
    assert {one.rate for one in history.points[1:]} == {3.0}


def test_steps_that_are_repeated_after_a_restart_are_no_negative_rate() -> None:
    history = MetricHistory(2.0)
    for at, step in ((0.0, 10), (2.0, 20), (4.0, 12), (6.0, 18)):
        history.add(at, [RankWatch(0, step=step), RankWatch(1, step=step - 1)])
    assert [one.step for one in history.points] == [10, 20, 12, 18]
    assert [one.rate for one in history.points] == [None, 5.0, None, 3.0]


def test_a_hang_brings_the_rate_to_zero() -> None:
    history = MetricHistory(2.0)
    for at in range(0, 60, 2):
        history.add(float(at), [RankWatch(0, step=min(at, 20))])
    assert history.rate == 0.0
    assert history.step == 20


def test_a_job_that_reports_no_steps_has_no_rate() -> None:
    history = MetricHistory(2.0)
    history.add(0.0, [RankWatch(0)])
    history.add(2.0, [RankWatch(0)])
    assert (history.step, history.rate) == (None, None)


def test_a_clock_that_goes_back_breaks_nothing() -> None:
    history = MetricHistory(2.0)
    for at, step in ((100.0, 1), (50.0, 2), (102.0, 3)):
        history.add(at, [RankWatch(0, step=step)])
    assert [one.at for one in history.points] == [100.0, 102.0]


def test_the_loss_comes_first_and_metrics_are_bounded() -> None:
    history = MetricHistory(2.0)
    many = {f"m{number}": 1.0 for number in range(20)}
    history.add(0.0, [RankWatch(1, metrics={"loss": 9.0}), RankWatch(0, metrics=many)])
    assert history.names == ("loss", "m0", "m1", "m2")
    assert len(history.names) == METRICS_MAX
    history.add(2.0, [RankWatch(1, metrics={"loss": 8.0}), RankWatch(0, metrics={"loss": 7.0})])
    assert history.points[-1].metrics == {"loss": 7.0}, "of the lowest rank"


def test_a_value_that_is_no_number_is_a_gap() -> None:
    history = MetricHistory(2.0)
    metrics = {"loss": math.nan, "norm": math.inf, "x" * 500: 1.0}
    history.add(0.0, [RankWatch(0, metrics=metrics)])
    assert history.names == ("x" * NAME_CHARACTERS,)
