"""An incident as a trace: stages at their times, within the whole; ids that follow from its uid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbroken.core.job.record.spans import IncidentName, Span, trace_of
from unbroken.spec.job.incident import Incident, Remedy, Symptom

UID = "3f2b8c1e-5a77-4c0d-9e21-0d4f6b7a8c99"
NAMED = IncidentName(UID, "lm-2", "team", "lm")
KILLED = Symptom(10.0, "Signal", "killed by SIGKILL", "lm-pods-1", "n1", rank=3, exit_code=137)
MISSED = Symptom(9.5, "PeerLost", "rank 3 is gone", "lm-pods-0", "n0", rank=0)
ENDED = Incident(
    *(2, 1, KILLED, (MISSED, KILLED), Remedy.PROCESS, "all pods are healthy"),
    detected_at=10.2,
    stopped_at=10.3,
    ready_at=10.4,
    started_at=11.0,
    progress_at=14.0,
    ended_at=14.1,
    outcome="recovered",
    progress_before=9.0,
    step=30,
    resumed_step=29,
    slowest={"stopped": "lm-pods-0"},
)


def times(incident: Incident) -> list[tuple[str, float, float]]:
    """(stage, from, to)."""
    return [(one.name, one.start, one.end) for one in trace_of(incident, NAMED).stages]


def test_stages_follow_each_other_within_the_whole() -> None:
    trace = trace_of(ENDED, NAMED)
    assert (trace.whole.name, trace.whole.start, trace.whole.end) == ("incident Signal", 10.0, 14.1)
    assert times(ENDED) == [
        ("detect", 10.0, 10.2),
        ("stop", 10.2, 10.3),
        ("ready", 10.3, 10.4),
        ("start", 10.4, 11.0),
        ("progress", 11.0, 14.0),
    ]
    last = {one.name: dict(one.attributes) for one in trace.stages if one.attributes}
    assert last == {"stop": {"unbroken.stage.last_pod": "lm-pods-0"}}


@pytest.mark.parametrize(
    ("incident", "stages"),
    [
        # A hang is noticed, and then every rank looked at.
        (
            replace(ENDED, examined_at=10.25),
            ["detect", "examine", "stop", "ready", "start", "progress"],
        ),
        # The next attempt was not ready when the job was given up.
        (replace(ENDED, ready_at=None, progress_at=None), ["detect", "stop"]),
        # Nothing happened but the decision.
        (replace(ENDED, stopped_at=None), ["detect"]),
    ],
)
def test_each_stage_that_was_reached_has_a_span(incident: Incident, stages: list[str]) -> None:
    assert [name for name, _, _ in times(incident)] == stages


@pytest.mark.parametrize(
    "incident",
    [
        ENDED,
        # The clock of the culprit's node is ahead.
        replace(ENDED, culprit=replace(KILLED, at=10.9)),
        # A worker wrote before the last agent had said that it runs its own.
        replace(ENDED, progress_at=10.6),
        replace(ENDED, ended_at=None),
        replace(ENDED, ended_at=12.0),
    ],
)
def test_no_stage_ends_before_it_begins_or_outside_of_the_whole(incident: Incident) -> None:
    trace = trace_of(incident, NAMED)
    for one in trace.stages:
        assert trace.whole.start <= one.start <= one.end <= trace.whole.end


def test_the_whole_names_job_culprit_and_cost() -> None:
    assert trace_of(ENDED, NAMED).whole.attributes == {
        "k8s.namespace.name": "team",
        "k8s.pod.name": "lm-pods-1",
        "k8s.node.name": "n1",
        "error.type": "Signal",
        "process.exit.code": 137,
        "unbroken.job.name": "lm",
        "unbroken.incident.name": "lm-2",
        "unbroken.incident.attempt": 1,
        "unbroken.incident.rank": 3,
        "unbroken.incident.cause": "killed by SIGKILL",
        "unbroken.incident.trigger": "PeerLost",
        "unbroken.incident.signals": 2,
        "unbroken.incident.remedy": "process",
        "unbroken.incident.reason": "all pods are healthy",
        "unbroken.incident.outcome": "recovered",
        "unbroken.incident.lost_seconds": 5.0,
        "unbroken.incident.lost_steps": 2,
    }


def test_only_a_job_that_went_on_is_without_a_problem() -> None:
    assert trace_of(ENDED, NAMED).problem == ""
    assert trace_of(replace(ENDED, outcome="failed again"), NAMED).problem == "failed again"


def test_ids_follow_from_the_uid() -> None:
    def ids(spans: tuple[Span, ...]) -> set[int]:
        return {one.id for one in spans}

    trace, again = trace_of(ENDED, NAMED), trace_of(replace(ENDED, resumed="later"), NAMED)
    other = trace_of(ENDED, replace(NAMED, uid=UID.replace("3", "4")))
    assert f"{trace.id:032x}" == UID.replace("-", "")
    found = ids((trace.whole, *trace.stages))
    assert found == ids((again.whole, *again.stages))
    assert len(found) == 6
    assert not found & ids((other.whole, *other.stages))
    assert all(0 < one < 2**64 for one in found)
    odd = trace_of(ENDED, replace(NAMED, uid="an odd uid"))
    assert 0 < odd.id < 2**128
