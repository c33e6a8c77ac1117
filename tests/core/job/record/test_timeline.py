"""A job's time by activity: every second once, whatever the records and the clocks say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.job.record.timeline import (
    TWICE,
    Goodput,
    end_life,
    goodput,
    lost_seconds,
    lost_steps,
    redo_seconds,
    settle,
)
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import Condition, JobStatus

START = 1_000_000.0
RUNNING = JobStatus(start_time=START)
SUSPENDED = replace(RUNNING, conditions=(Condition("Suspended", "True"),))


def at(seconds: float) -> float:
    return START + seconds


def broken(number: int = 1, fault: str = "ProcessExited", **times: float | int | None) -> Incident:
    """Return an incident; times are seconds after the start of the job."""
    culprit = Symptom(START, fault, "killed")
    is_time = {"step", "resumed_step", "step_seconds"}
    given = {k: v if k in is_time or v is None else at(v) for k, v in times.items()}
    blank = Incident(number, 0, culprit, (culprit,), Remedy.PROCESS, "", detected_at=START)
    return replace(blank, **given)  # type: ignore[arg-type]


ONE = broken(progress_before=40, detected_at=45, progress_at=50, ended_at=50)


def test_an_incident_costs_from_progress_to_progress() -> None:
    assert lost_seconds(ONE) == 10
    assert lost_seconds(replace(ONE, progress_before=None)) == 5
    assert lost_seconds(replace(ONE, progress_at=None, ended_at=at(70))) == 30
    assert lost_seconds(replace(ONE, progress_at=None, ended_at=None)) is None
    assert lost_seconds(replace(ONE, progress_before=at(60))) == 5


@pytest.mark.parametrize(
    ("step", "resumed", "lost"),
    [(120, 101, 20), (120, 120, 1), (120, 121, 0), (120, 300, 0), (None, 1, None), (7, None, None)],
)
def test_steps_are_lost_from_the_first_that_is_made_again(
    step: int | None, resumed: int | None, lost: int | None
) -> None:
    incident = broken(step=step, resumed_step=resumed, step_seconds=0.5)
    assert lost_steps(incident) == lost
    assert redo_seconds(incident) == (lost or 0) * 0.5


def test_a_job_that_runs() -> None:
    ledger = Ledger(progress_at=at(10))
    twice = replace(ONE, step=120, resumed_step=101, step_seconds=0.5)
    found = goodput(RUNNING, [twice], ledger, at(100))
    lost = {"ProcessExited": 10, TWICE: 10}
    assert found == Goodput(100, 10, 70, lost, steps=20, share=0.7)


def test_a_job_that_has_ended_counts_to_its_end() -> None:
    ended = replace(RUNNING, completion_time=at(60))
    found = goodput(ended, [ONE], Ledger(progress_at=at(10)), at(9000))
    assert (found.total, found.startup, found.productive) == (60, 10, 40)


def test_an_open_incident_counts_up_to_now() -> None:
    still_open = replace(ONE, progress_at=None, ended_at=None)
    found = goodput(RUNNING, [still_open], Ledger(progress_at=at(10)), at(100))
    assert found.lost == {"ProcessExited": 60}
    assert found.share == 0.3


def test_a_cost_is_not_known_if_nothing_has_shown_that_training_resumed() -> None:
    silent = replace(ONE, progress_at=None, started_at=at(52), ended_at=at(112))
    closed = replace(silent, outcome="recovered")
    ledger = Ledger(progress_at=at(10))
    for unknown, seconds in ((closed, 12), (replace(closed, first_output_at=at(53)), 13)):
        assert lost_seconds(unknown) is None
        found = goodput(RUNNING, [unknown], ledger, at(200))
        assert (found.lost, found.unknown) == ({"ProcessExited": seconds}, 1)
        assert settle(Ledger(), unknown, is_charged=True).seconds == {"ProcessExited": seconds}
    failed = replace(silent, outcome="failed again")
    assert lost_seconds(failed) == 72
    assert goodput(RUNNING, [failed], ledger, at(200)).lost == {"ProcessExited": 72}


def test_where_faults_overlap_the_first_counts() -> None:
    second = broken(2, "NodeLost", progress_before=45, detected_at=48, progress_at=60)
    within = broken(3, "PodFailed", detected_at=46, progress_at=49)
    found = goodput(RUNNING, [within, second, ONE], Ledger(progress_at=at(10)), at(100))
    assert found.lost == {"ProcessExited": 10, "NodeLost": 10}
    assert found.productive == 70


def test_without_steps_a_line_before_the_fault_is_no_progress() -> None:
    early = broken(progress_before=5, detected_at=6, progress_at=20)
    assert goodput(RUNNING, [early], Ledger(), at(100)).startup == 5
    assert goodput(RUNNING, [replace(early, progress_at=None)], Ledger(), at(100)).share is None
    with_steps = replace(early, progress_at=None, step=3, ended_at=at(20))
    assert goodput(RUNNING, [with_steps], Ledger(), at(100)).share == 0.8


def test_a_fault_before_the_first_progress_is_no_start_up() -> None:
    early = broken(detected_at=5, progress_at=20)
    found = goodput(RUNNING, [early], Ledger(), at(100))
    assert (found.startup, found.lost, found.productive) == (5, {"ProcessExited": 15}, 80)


def test_nothing_is_said_of_a_job_without_progress() -> None:
    found = goodput(RUNNING, [], Ledger(), at(30))
    assert (found.total, found.startup, found.productive, found.share) == (30, 30, 0, None)
    assert goodput(JobStatus(), [], Ledger(), at(0)) == Goodput(0, 0, 0)


def test_a_suspension_is_no_part_of_the_time() -> None:
    ledger = end_life(Ledger(progress_at=at(10)), START, at(60))
    assert ledger == Ledger(active_seconds=60, startup_seconds=10)
    asleep = goodput(SUSPENDED, [ONE], ledger, at(160), created=START)
    assert asleep == Goodput(60, 10, 40, {"ProcessExited": 10}, 100, share=40 / 60)

    resumed = JobStatus(start_time=at(160))
    later = replace(ledger, progress_at=at(180))
    awake = goodput(resumed, [ONE], later, at(200), created=START)
    assert awake == Goodput(100, 30, 60, {"ProcessExited": 10}, 100, share=0.6)


def test_a_life_without_progress_was_all_start_up() -> None:
    ledger = end_life(Ledger(), START, at(60))
    assert (ledger.active_seconds, ledger.startup_seconds) == (60, 60)
    assert goodput(SUSPENDED, [], ledger, at(70)).share is None
    assert end_life(ledger, None, at(99)) == ledger


def test_a_deleted_incident_goes_on_to_count() -> None:
    twice = replace(ONE, step=120, resumed_step=101, step_seconds=0.5)
    ledger = Ledger(progress_at=at(10))
    kept = goodput(RUNNING, [twice], ledger, at(100))
    settled = settle(ledger, twice, is_charged=True)
    assert (settled.incidents, settled.steps) == (1, 20)
    assert goodput(RUNNING, [], settled, at(100)) == kept


TIMES = st.integers(-50, 150) | st.sampled_from([-1e18, 1e18])
SECONDS = st.integers(-9, 99).map(float) | st.sampled_from([float("inf"), float("nan"), 1e300])
FAULTS = st.sampled_from(["ProcessExited", "NodeLost", "Stalled"])
INCIDENTS = st.builds(
    broken,
    st.integers(1, 9),
    FAULTS,
    detected_at=TIMES,
    progress_before=st.none() | TIMES,
    progress_at=st.none() | TIMES,
    ended_at=st.none() | TIMES,
    step=st.none() | st.integers(-5, 200),
    resumed_step=st.none() | st.integers(-5, 200),
    step_seconds=st.none() | SECONDS,
)
LEDGERS = st.builds(
    Ledger,
    seconds=st.dictionaries(FAULTS, SECONDS, max_size=3),
    active_seconds=SECONDS,
    startup_seconds=SECONDS,
    progress_at=st.none() | TIMES.map(at),
)
STATUSES = st.builds(
    JobStatus,
    start_time=st.none() | TIMES.map(at),
    completion_time=st.none() | TIMES.map(at),
    conditions=st.sampled_from([(), SUSPENDED.conditions, (Condition("Failed", "True"),)]),
)


@given(STATUSES, st.lists(INCIDENTS, max_size=5), LEDGERS, TIMES, st.none() | TIMES)
def test_the_parts_add_up_and_none_is_negative(
    status: JobStatus, incidents: list[Incident], ledger: Ledger, now: float, made: float | None
) -> None:
    found = goodput(status, incidents, ledger, at(now), None if made is None else at(made))
    parts = [found.startup, found.productive, *found.lost.values()]
    assert sum(parts) == pytest.approx(found.total)
    assert min(*parts, found.total, found.suspended) >= 0
    assert found.share is None or 0 <= found.share <= 1
    assert list(found.lost.values()) == sorted(found.lost.values(), reverse=True)


@given(st.lists(INCIDENTS, max_size=5), st.integers(0, 5))
def test_it_does_not_matter_which_incidents_come_first(incidents: list[Incident], by: int) -> None:
    turned = incidents[by:] + incidents[:by]
    one, other = (goodput(RUNNING, some, Ledger(), at(100)) for some in (incidents, turned))
    assert sum(one.lost.values()) == pytest.approx(sum(other.lost.values()))


@given(LEDGERS, st.lists(INCIDENTS, max_size=5))
def test_a_ledger_only_grows(ledger: Ledger, incidents: list[Incident]) -> None:
    for incident in incidents:
        grown = settle(ledger, incident, is_charged=True)
        assert grown.incidents == ledger.incidents + 1
        assert grown.steps >= ledger.steps
        assert grown.uncharged == ledger.uncharged
        ledger = grown
