"""The interval that is advised: against published formulas, a simulated optimum, and its bounds."""

from __future__ import annotations

from math import exp, expm1, isclose, sqrt

from hypothesis import given
from hypothesis import strategies as st

from unbroken.worker.checkpointing.advice import (
    INTERVAL_SECONDS_MAX,
    INTERVAL_SECONDS_MIN,
    advise,
    has_changed,
    mtbf_seconds,
    optimal_seconds,
    steps_to_wait,
)

costs = st.floats(0.0, 3600.0)
mtbfs = st.floats(60.0, 1e9)


@given(cost=st.floats(0.01, 60.0), ratio=st.floats(10.0, 1e6))
def test_no_other_interval_loses_less(cost: float, ratio: float) -> None:
    """Daly's exact cost of a run with exponential failures, at the advised interval and around."""
    mtbf = cost * ratio

    def lost(interval: float) -> float:
        return expm1(interval / mtbf) / (interval - cost)

    best = optimal_seconds(cost, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0):
        if best * factor > cost * 1.01:
            assert lost(best) <= lost(best * factor) * (1 + 1e-9)
    assert exp(0) == 1


def test_cheap_saves_follow_young() -> None:
    assert isclose(optimal_seconds(0.1, 1e6), sqrt(2 * 0.1 * 1e6), rel_tol=1e-3)


def test_saves_dearer_than_failures_wait_for_the_mean_time_between_them() -> None:
    assert optimal_seconds(300.0, 100.0) == 400.0


@given(cost=costs, write=costs, mtbf=mtbfs)
def test_advice_keeps_its_bounds(cost: float, write: float, mtbf: float) -> None:
    advice = advise(cost, write, mtbf)
    assert INTERVAL_SECONDS_MIN <= advice.interval_seconds <= INTERVAL_SECONDS_MAX
    assert advice.interval_seconds >= min(write, INTERVAL_SECONDS_MAX)
    assert 0 <= advice.expected_loss <= 1


@given(cost=costs, more=costs, write=costs, mtbf=mtbfs)
def test_dearer_saves_are_made_less_often(
    cost: float, more: float, write: float, mtbf: float
) -> None:
    dearer = advise(cost + more, write, mtbf).interval_seconds
    # Beyond cost = 2 mtbf Daly's interval is defined piecewise and steps down there.
    if cost + more < 2 * mtbf:
        assert dearer >= advise(cost, write, mtbf).interval_seconds * (1 - 1e-9)


@given(workers=st.integers(1, 100_000), failures=st.integers(0, 500), elapsed=st.floats(0, 1e8))
def test_failures_bring_the_mean_time_down(workers: int, failures: int, elapsed: float) -> None:
    now = mtbf_seconds(workers, failures, elapsed)
    assert mtbf_seconds(workers, failures + 1, elapsed) < now
    assert mtbf_seconds(workers + 1, failures, elapsed) < now
    assert mtbf_seconds(workers, failures, elapsed + 3600) > now


def test_the_prior_is_the_published_rate() -> None:
    hours = mtbf_seconds(16_384, 0, 0) / 3600
    assert isclose(hours, 3.1, rel_tol=0.01)  # "one per 3.1 h" at 16,384 GPUs


def test_a_job_that_fails_often_is_believed_soon() -> None:
    ten_hours = mtbf_seconds(8, 20, 36_000)
    assert ten_hours < mtbf_seconds(8, 0, 36_000) / 20


def test_what_is_told_is_what_changed_by_a_fifth() -> None:
    before = advise(1.0, 0.0, 1e5)
    assert has_changed(None, before)
    assert not has_changed(before, advise(1.3, 0.0, 1e5))
    assert has_changed(before, advise(2.0, 0.0, 1e5))


@given(seconds=st.floats(0.001, 1e5), step=st.floats(0.0001, 100.0))
def test_looks_come_closer_until_it_is_due(seconds: float, step: float) -> None:
    """Few looks, and the save begins within a step of the time asked for."""
    left, looks = seconds, 0
    while wait := steps_to_wait(left, step):
        left -= wait * step
        looks += 1
    assert abs(left) <= max(step, 1e-9)
    assert looks <= 22 + seconds / step / 5e5


def test_steps_that_take_no_time_are_looked_at_again() -> None:
    assert steps_to_wait(10.0, 0.0) == 1
    assert steps_to_wait(-1.0, 5.0) == 0
