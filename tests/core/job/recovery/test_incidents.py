"""Signs become one incident, and its culprit is the first cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbroken.core.job.events import NodeName, WriteIncident
from unbroken.core.job.recovery.incidents import (
    INCIDENTS_MAX,
    RESTART_REQUESTED,
    SYMPTOMS_MAX,
    Incidents,
    culprit,
)
from unbroken.core.job.recovery.ladder import choose, escalated
from unbroken.spec.job.incident import Incident, Remedy, Symptom


def sign(at: float, fault: str = "ExitCode", pod: str = "p", rank: int | None = None) -> Symptom:
    """A sign on node n."""
    return Symptom(at, fault, "text", pod=pod, node="n", rank=rank)


def terminated(at: float, pod: str) -> Symptom:
    """Return the end of a worker that received a stop."""
    return replace(sign(at, "Signal", pod), exit_code=143)


def opened(*symptoms: Symptom) -> Incidents:
    """An open incident of these signs."""
    incidents = Incidents()
    incidents.open_incident(0, symptoms, Remedy.PROCESS, "why", 10)
    return incidents


@pytest.mark.parametrize(
    ("symptoms", "expected"),
    [
        ([sign(2, pod="b"), sign(1, pod="a")], "a"),
        ([sign(1, "PeerLost", "a"), sign(9, pod="b")], "b"),
        ([sign(1, pod="a"), sign(9, "EarlyExit", "b")], "b"),
        ([sign(3, "PeerLost", "a"), sign(2, "PeerLost", "b")], "b"),
        ([sign(1, RESTART_REQUESTED, "a"), sign(2, pod="b")], "b"),
        ([sign(1, RESTART_REQUESTED, "a"), sign(2, "PeerLost", "b")], "b"),
        # A worker that received a stop is no cause, but more likely than one that misses a peer.
        ([terminated(1, "a"), sign(2, pod="b")], "b"),
        ([terminated(2, "a"), sign(1, "PeerLost", "b")], "a"),
        ([terminated(2, "a"), sign(3, "NodeLost", "b")], "b"),
        ([sign(1, "PeerLost", "a"), sign(2, "CudaError", "b"), sign(3, "PeerLost", "c")], "b"),
    ],
)
def test_culprit(symptoms: list[Symptom], expected: str) -> None:
    assert culprit(symptoms).pod == expected


def test_the_deletion_of_its_pod_is_why_an_agent_was_lost() -> None:
    incidents = opened(sign(1, "AgentLost", "a"), sign(1.5, "PeerLost", "b"))
    assert incidents.open is not None
    assert incidents.add_signs([sign(2, "PodDeleted", "b")])
    assert incidents.open.culprit.fault == "AgentLost"
    # That may be what was done about the agent.
    assert incidents.add_signs([sign(2, "NodeLost", "a")])
    assert incidents.open.culprit.fault == "AgentLost"
    assert incidents.add_signs([sign(3, "PodDeleted", "a")])
    assert (incidents.open.culprit.pod, incidents.open.culprit.fault) == ("a", "PodDeleted")


def test_same_sign_joins_once() -> None:
    incidents = opened(sign(1, rank=3))
    assert not incidents.add_signs([sign(2, rank=3)])
    assert incidents.add_signs([sign(2, rank=4)])
    assert incidents.open is not None
    assert [s.rank for s in incidents.open.signals] == [3, 4]


def test_an_incident_stays_small_and_keeps_its_culprit() -> None:
    incidents = opened(*(sign(i, "PeerLost", rank=i) for i in range(SYMPTOMS_MAX + 40)))
    incidents.add_signs([sign(99, "ExitCode", rank=999)])
    assert incidents.open is not None
    assert len(incidents.open.signals) == SYMPTOMS_MAX
    assert incidents.open.culprit.rank == 999
    assert incidents.open.culprit in incidents.open.signals


def test_it_is_written_when_it_changes_and_not_for_every_sign() -> None:
    incidents = opened(sign(1, rank=0))
    assert len(incidents.writes()) == 1
    assert incidents.writes() == []
    incidents.add_signs([sign(2, rank=1)])
    assert incidents.writes() == []
    incidents.change(stopped_at=11)
    assert len(incidents.writes()) == 1
    (written,) = incidents.close("recovered", 12)
    assert isinstance(written, WriteIncident)
    assert (written.incident.outcome, len(written.incident.signals)) == ("recovered", 2)
    assert incidents.close("again", 13) == []


def test_numbers_go_on_after_those_that_are_remembered() -> None:
    incidents = Incidents()
    first = sign(1)
    old = Incident(7, 3, first, (first,), Remedy.POD, "why", 1, outcome="recovered")
    incidents.remember(old)
    assert incidents.open is None
    assert incidents.offences[NodeName("n")] == 1
    assert incidents.open_incident(4, [sign(2)], Remedy.PROCESS, "why", 2).number == 8


def test_requests_cost_no_budget_and_blame_no_node() -> None:
    incidents = opened(sign(5, RESTART_REQUESTED))
    incidents.close("recovered", 12)
    assert (incidents.uncharged, incidents.offences) == (1, {})


def test_the_oldest_are_let_go() -> None:
    incidents = Incidents()
    for number in range(1, INCIDENTS_MAX + 3):
        incidents.open_incident(0, [sign(number)], Remedy.PROCESS, "why", number)
        retired = [one.number for one in incidents.retire()]
        assert retired == ([number - INCIDENTS_MAX] if number > INCIDENTS_MAX else [])
        incidents.close("recovered", number)
    assert len(incidents.closed) == INCIDENTS_MAX


def test_lost_pods_are_replaced_and_named() -> None:
    assert choose(Remedy.PROCESS, "b", [])[0] is Remedy.PROCESS
    remedy, reason = choose(Remedy.PROCESS, "b", ["p1", "p2", "p3", "p4", "p5"])
    assert (remedy, reason) == (Remedy.POD, "lost p1, p2, p3 and 2 more; b")
    assert choose(Remedy.FAIL, "b", ["p1"]) == (Remedy.FAIL, "b")


def test_a_pod_lost_later_is_named_and_no_pod_called_well() -> None:
    _, reason = choose(Remedy.PROCESS, "b", [])
    assert reason == "all pods are healthy; b"
    assert escalated(reason, ["p1"]) == "lost p1; b"


def test_secrets_are_not_written() -> None:
    incidents = Incidents()
    secret = Symptom(1, "ExitCode", "MY_TOKEN=abcdef", evidence=("https://me:pw@host/",))
    incidents.open_incident(0, [secret], Remedy.PROCESS, "why", 10)
    (opened,) = incidents.writes()
    (closed,) = incidents.close("recovered", 12)
    for written in (opened, closed):
        assert isinstance(written, WriteIncident)
        culprit = written.incident.culprit
        assert (culprit.text, culprit.evidence) == (
            "MY_TOKEN=[removed]",
            ("https://[removed]@host/",),
        )
