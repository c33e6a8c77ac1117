"""The figures of `benchmarks/recovery.py` from times that were recorded in runs of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from recovery_records import (
    Recovery,
    percentile,
    rate,
    stage_seconds,
    summary,
    with_incidents,
)

from unbroken.spec.job.incident import Incident, Remedy, Symptom

KILL = Recovery(
    mode="torchrun-fresh-store",
    rank=1,
    killed_at=1795245776.000,
    detected_at=1795245776.072,
    stopped_at=1795245777.021,
    ready_at=1795245778.200,
    started_at=1795245778.220,
    stepped_at=1795245786.148,
    details={"import_torch": 3.2},
)


def test_stages_add_up_to_the_whole() -> None:
    stages = stage_seconds(KILL)
    assert list(stages) == ["detect", "stop", "ready", "start", "first_step"]
    assert stages["stop"] == pytest.approx(0.949, abs=1e-6)
    assert sum(stages.values()) == pytest.approx(KILL.seconds)


def test_a_stage_that_was_not_seen_counts_to_the_next() -> None:
    stages = stage_seconds(replace(KILL, ready_at=None))
    assert "ready" not in stages
    assert stages["start"] == pytest.approx(1.199, abs=1e-6)


def test_a_stage_that_ended_before_the_one_before_it_took_no_time() -> None:
    stages = stage_seconds(replace(KILL, stopped_at=KILL.killed_at + 0.01))
    assert stages["stop"] == 0.0
    assert stages["ready"] == pytest.approx(2.128, abs=1e-6)
    assert sum(stages.values()) == pytest.approx(KILL.seconds)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([float(n) for n in range(1, 21)], 0.95, 19.05),
        ([7.0], 0.95, 7.0),
        ([1.0, 5.0], 1.0, 5.0),
    ],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_a_kill_that_nothing_followed_counts_as_not_recovered_and_in_no_figure() -> None:
    lost = Recovery(KILL.mode, 2, 0.0, detected_at=0.1, why_not="no step in 60 s")
    entry = summary(KILL.mode, [KILL, lost, replace(KILL, stepped_at=1795245788.148)])
    assert (entry["kills"], entry["recovered"]) == (3, 2)
    assert entry["p50_seconds"] == pytest.approx(11.148)
    assert entry["detect_to_ready_p50_seconds"] == pytest.approx(2.128)
    assert entry["details"] == {"import_torch": 3.2}
    assert entry["not_recovered"] == {"no step in 60 s": 1}


def test_the_spread_and_the_lost_steps_of_a_mode() -> None:
    took = (1.0, 2.0, 3.0, 10.0)
    kills = [
        replace(KILL, stepped_at=KILL.killed_at + 1 + seconds, lost_steps=lost)
        for lost, seconds in enumerate(took)
    ]
    entry = summary(KILL.mode, kills)
    assert entry["mean_seconds"] == pytest.approx(5.0)
    assert entry["max_seconds"] == pytest.approx(11.0)
    assert (entry["lost_steps_p50"], entry["lost_steps_max"]) == (1.5, 3)
    assert [one["seconds"] for one in entry["trials"]] == pytest.approx([2.0, 3.0, 4.0, 11.0])  # type: ignore[attr-defined]


def test_an_outlier_is_listed_with_the_stage_that_took_longer_than_usual() -> None:
    late = replace(
        KILL, ready_at=KILL.killed_at + 40, started_at=None, stepped_at=KILL.killed_at + 48
    )
    entry = summary(KILL.mode, [KILL, KILL, KILL, late])
    (found,) = entry["outliers"]  # type: ignore[misc]
    assert found["stage"] == "ready"
    assert found["seconds"] == pytest.approx(48.0)
    assert summary(KILL.mode, [KILL] * 4)["outliers"] == []


def test_modes_are_rated_by_the_median_of_one_of_them() -> None:
    entries = [
        dict(summary(mode, [replace(KILL, stepped_at=KILL.killed_at + took)] if took else []))
        for mode, took in (("ours", 0.5), ("theirs", 10.0), ("none", 0.0))
    ]
    rate(entries, "theirs")
    assert [entry["times_faster"] for entry in entries] == [20.0, 1.0, None]
    rate(entries, "missing")
    assert [entry["times_faster"] for entry in entries] == [None, None, None]


def test_a_mode_that_never_recovered_has_no_figures() -> None:
    entry = summary("torchrun", [Recovery("torchrun", 0, 0.0, why_not="no step in 60 s")])
    assert entry["p50_seconds"] is None
    assert entry["p95_seconds"] is None
    assert entry["stages"] == {}


def incident(number: int, detected_after: float, ready_after: float) -> Incident:
    """Return an incident as the operator writes it; times are seconds after the kill."""
    at = KILL.killed_at + detected_after
    culprit = Symptom(at, "Signal", "rank 1: killed by SIGKILL", rank=1)
    return Incident(
        number,
        number - 1,
        culprit,
        (culprit,),
        Remedy.PROCESS,
        "workers of healthy pods",
        detected_at=at,
        stopped_at=at + 0.02,
        ready_at=KILL.killed_at + ready_after,
        started_at=KILL.killed_at + ready_after + 0.01,
    )


def test_incidents_tell_when_the_operator_knew_and_when_agents_were_ready() -> None:
    seen = replace(KILL, detected_at=KILL.killed_at + 0.002)
    told = with_incidents(seen, [incident(4, 0.005, 0.045)])
    assert told.detected_at == pytest.approx(KILL.killed_at + 0.005)
    assert told.detect_to_ready == pytest.approx(0.04, abs=1e-6)
    assert told.details["incidents"] == 1
    assert told.remedy == "process"
    assert told.stopped_at == seen.stopped_at, "what was seen from outside counts first"
    assert told.details["import_torch"] == 3.2
    names = ("reaped", "operator_detected", "operator_stopped", "operator_ready")
    parts = [told.details[name] for name in names]
    assert parts == pytest.approx([0.002, 0.003, 0.02, 0.02], abs=1e-6)
    assert "operator_progress" not in told.details


def test_two_incidents_of_one_kill_count_from_the_first_to_the_last() -> None:
    told = with_incidents(KILL, [incident(4, 0.005, 0.045), incident(5, 3.0, 3.1)])
    assert told.details["incidents"] == 2
    assert told.detect_to_ready == pytest.approx(3.095, abs=1e-6)


def test_beyond_a_step_is_what_is_left_without_the_usual_step_of_that_job() -> None:
    """A kill without a known step counts in the other figures only."""
    ours = replace(KILL, mode="warm", stepped_at=KILL.killed_at + 4.9, step_seconds=2.2)
    theirs = replace(KILL, stepped_at=KILL.killed_at + 12.5, step_seconds=2.2)
    entries = [
        dict(summary("warm", [ours, replace(ours, step_seconds=None)])),
        dict(summary(KILL.mode, [theirs])),
    ]
    rate(entries, KILL.mode)
    assert entries[0]["beyond_step_p50_seconds"] == pytest.approx(2.7)
    assert entries[0]["step_p50_seconds"] == pytest.approx(2.2)
    assert entries[0]["times_less_beyond_step"] == pytest.approx(10.3 / 2.7)
    assert entries[0]["times_faster"] == pytest.approx(12.5 / 4.9)


def test_a_recovery_within_a_usual_step_has_no_ratio_beyond_it() -> None:
    quick = dict(summary("warm", [replace(KILL, mode="warm", step_seconds=60.0)]))
    usual = dict(summary(KILL.mode, [replace(KILL, step_seconds=2.2)]))
    rate([quick, usual], KILL.mode)
    assert quick["times_less_beyond_step"] is None
