"""Tables: columns, ages and rows that `recorded/objects` does not compare with the real server."""

from __future__ import annotations

import pytest

from tests.tables import cases
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.tables.cells import age, human_duration, pod_summary
from unbroken.local.apiserver.tables.columns import table

KINDS = {kind.resource: kind for kind in BUILTINS}
NOW = 1_800_000_000.0
HOUR, DAY, YEAR = 3600, 86400, 365 * 86400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "<invalid>"),
        (-1.5, "0s"),
        (0.9, "0s"),
        (119, "119s"),
        (120, "2m"),
        (125, "2m5s"),
        (600, "10m"),
        (659, "10m"),
        (179 * 60, "179m"),
        (3 * HOUR, "3h"),
        (3 * HOUR + 60, "3h1m"),
        (8 * HOUR + 60, "8h"),
        (47 * HOUR, "47h"),
        (2 * DAY, "2d"),
        (2 * DAY + HOUR, "2d1h"),
        (8 * DAY + HOUR, "8d"),
        (2 * YEAR - 1, "729d"),
        (2 * YEAR, "2y"),
        (3 * YEAR + DAY, "3y1d"),
        (8 * YEAR + DAY, "8y"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("timestamp", "text"),
    [
        (None, "<unknown>"),
        ("", "<unknown>"),
        ("yesterday", "<unknown>"),
        ("2027-01-15T07:59:00", "<unknown>"),
        ("2027-01-15T07:59:30Z", "30s"),
        ("2027-01-15T07:59:30.250000Z", "29s"),
        ("2027-01-15T09:59:30+02:00", "30s"),
    ],
)
def test_an_age_is_the_time_since_a_timestamp(timestamp: str | None, text: str) -> None:
    assert age(NOW, timestamp) == text


def pod(spec: Object, **status: object) -> Object:
    """A pod."""
    return {"metadata": {"name": "p"}, "spec": spec, "status": status}


ONE: Object = {"containers": [{"name": "a"}]}


@cases
def test_a_pod_is_summed_up(content: Object, status: str, ready: str, restarts: str) -> None:
    found = pod_summary(content)
    assert (found.status, f"{found.ready}/{found.total}") == (status, ready)
    assert found.restarts_text(NOW) == restarts


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Running"}, "Terminating"),
        ({"phase": "Succeeded"}, "Succeeded"),
        ({"phase": "Failed"}, "Failed"),
        ({"phase": "Running", "reason": "NodeLost"}, "Unknown"),
    ],
)
def test_a_pod_that_is_being_deleted_says_so_until_it_has_ended(status: Object, shown: str) -> None:
    content = pod(ONE, **status)
    assert pod_summary(content).status != "Terminating"
    content["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert pod_summary(content).status == shown


def row(resource: str, content: Object) -> Object:
    """One object's cells by column."""
    kind = KINDS[resource]
    made = table(kind, kind.versions["v1"], [content], NOW, "None", {})
    titles = [column["name"] for column in made["columnDefinitions"]]
    return dict(zip(titles, made["rows"][0]["cells"], strict=True))


def condition(name: str) -> Object:
    """A condition that is met."""
    return {"type": name, "status": "True", "lastTransitionTime": "2027-01-15T07:50:00Z"}


@pytest.mark.parametrize(
    ("meta", "conditions", "status"),
    [
        ({}, [], "Running"),
        ({}, ["Complete"], "Complete"),
        ({}, ["Failed"], "Failed"),
        ({}, ["Suspended"], "Suspended"),
        ({}, ["FailureTarget"], "FailureTarget"),
        ({}, ["SuccessCriteriaMet"], "SuccessCriteriaMet"),
        ({"deletionTimestamp": "x"}, ["Suspended"], "Terminating"),
        ({"deletionTimestamp": "x"}, ["Complete"], "Complete"),
    ],
)
def test_a_job_says_what_became_of_it(meta: Object, conditions: list[str], status: str) -> None:
    job = {"metadata": meta, "status": {"conditions": [condition(name) for name in conditions]}}
    assert row("jobs.batch", job)["Status"] == status


@pytest.mark.parametrize(
    ("status", "duration"),
    [
        ({}, ""),
        ({"startTime": "2027-01-15T07:45:00Z"}, "15m"),
        ({"startTime": "2027-01-15T07:45:00Z", "completionTime": "2027-01-15T07:45:30Z"}, "30s"),
        ({"startTime": "2027-01-15T07:45:00Z", "conditions": [condition("Failed")]}, "5m"),
    ],
)
def test_a_job_takes_time_until_it_has_ended(status: Object, duration: str) -> None:
    assert row("jobs.batch", {"metadata": {}, "status": status})["Duration"] == duration


@pytest.mark.parametrize(
    ("spec", "status", "shown"),
    [
        ({"type": "LoadBalancer"}, {}, "<pending>"),
        (
            {"type": "LoadBalancer", "externalIPs": ["1.2.3.4"]},
            {"loadBalancer": {"ingress": [{"hostname": "b"}, {"ip": "5.6.7.8"}]}},
            "5.6.7.8,b,1.2.3.4",
        ),
        ({"type": "NodePort"}, {}, "<none>"),
    ],
)
def test_a_service_shows_how_it_is_reached(spec: Object, status: Object, shown: str) -> None:
    content = {"metadata": {}, "spec": spec, "status": status}
    assert row("services", content)["External-IP"] == shown


def test_a_port_of_a_node_is_shown_beside_the_service_port() -> None:
    port = {"port": 80, "nodePort": 30080, "protocol": "TCP"}
    assert row("services", {"metadata": {}, "spec": {"ports": [port]}})["Port(s)"] == "80:30080/TCP"


@cases
def test_a_row_carries_what_was_asked_for(include: str, expected: Object | None) -> None:
    kind = KINDS["pods"]
    made = table(kind, kind.versions["v1"], [pod(ONE, phase="Failed")], NOW, include, {"x": 1})
    assert made["metadata"] == {"x": 1}
    assert made["rows"][0]["object"] == expected
    assert made["rows"][0]["conditions"][0]["reason"] == "Failed"
    assert len(made["rows"][0]["cells"]) == len(made["columnDefinitions"])


@pytest.mark.parametrize("kind", BUILTINS, ids=lambda kind: kind.resource)
def test_an_empty_object_of_any_kind_has_a_row(kind: object) -> None:
    assert row(kind.resource, {"metadata": {}})  # type: ignore[attr-defined]
