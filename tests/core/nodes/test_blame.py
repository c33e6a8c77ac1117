"""Faults that count for a node, their fading, and faults that do not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.nodes import blame
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.nodes.kinds import BLAME_MAX, BlameEntry, BlameKind, NodeRecordSpec
from unbroken.spec.nodes.values import Action

NOW = 1_800_000_000.0
DAY = 86400.0


def incident(fault: str, node: str = "node-1", **given: object) -> Incident:
    """Return an ended incident."""
    exit_code = given.pop("exit_code", None)
    culprit = Symptom(NOW, fault, "it broke", node=node, exit_code=exit_code)  # type: ignore[arg-type]
    found = Incident(1, 0, culprit, (culprit,), Remedy.POD, "", NOW, ended_at=NOW + 9)
    return replace(found, **given)  # type: ignore[arg-type]


def test_points_halve_every_week() -> None:
    record = blame.add(NodeRecordSpec(), blame.of_loss(NOW, "silent"), NOW)
    assert blame.score(record, NOW) == blame.LOST_POINTS
    assert blame.score(record, NOW + 7 * DAY) == pytest.approx(blame.LOST_POINTS / 2)
    assert blame.score(record, NOW + 14 * DAY) == pytest.approx(blame.LOST_POINTS / 4)


def test_worse_faults_weigh_more_and_harmless_ones_nothing() -> None:
    weights = [blame.of_fault(NOW, "x", "", action).weight for action in Action]
    assert weights == sorted(weights)
    harmless = blame.of_fault(NOW, "x", "", Action.NONE)
    assert blame.add(NodeRecordSpec(), harmless, NOW) == NodeRecordSpec()


def test_one_thing_counts_once() -> None:
    entry = blame.of_incident(incident("NodeLost"), "default/lm-1")
    assert entry is not None
    record = blame.add_incident(NodeRecordSpec(), entry, NOW)
    assert blame.add_incident(record, entry, NOW + DAY) is record
    assert len(blame.add(record, replace(entry, source="default/lm-2"), NOW).blame) == 2


@pytest.mark.parametrize(
    ("fault", "given", "points"),
    [
        ("NodeLost", {}, blame.INCIDENT_POINTS),
        ("NodeFault", {}, blame.INCIDENT_POINTS),
        ("CudaError", {}, blame.INCIDENT_POINTS),
        ("CudaError", {"confidence": "likely"}, blame.INCIDENT_POINTS),
        ("CudaError", {"confidence": "unsure"}, blame.LITTLE_POINTS),
        ("Signal", {"exit_code": 135}, blame.INCIDENT_POINTS),
        ("Signal", {"exit_code": 137}, blame.LITTLE_POINTS),
        ("PythonException", {"exit_code": 1}, blame.LITTLE_POINTS),
        ("Stalled", {}, blame.LITTLE_POINTS),
    ],
)
def test_incident_counts_fully_where_the_fault_is_the_machines(
    fault: str, given: dict[str, object], points: float
) -> None:
    entry = blame.of_incident(incident(fault, **given), "default/lm-1")
    assert entry is not None
    assert (entry.kind, entry.weight, entry.source) == (BlameKind.INCIDENT, points, "default/lm-1")
    assert "it broke" in entry.text


@pytest.mark.parametrize("given", [{"ended_at": None}, {"node": ""}])
def test_open_incident_and_one_of_no_node_blame_nobody(given: dict[str, object]) -> None:
    node = str(given.pop("node", "node-1"))
    assert blame.of_incident(incident("NodeLost", node, **given), "default/lm-1") is None


def test_incident_beside_the_fault_that_caused_it_counts_little() -> None:
    record = blame.add(NodeRecordSpec(), blame.of_fault(NOW - 60, "Xid79", "", Action.REBOOT), NOW)
    entry = blame.of_incident(incident("NodeFault"), "default/lm-1")
    assert entry is not None
    both = blame.add_incident(record, entry, NOW)
    assert blame.score(both, NOW) == pytest.approx(2.0 + blame.LITTLE_POINTS, abs=0.01)
    later = replace(entry, at=NOW + DAY / 2)
    apart = blame.add_incident(record, later, NOW + DAY / 2)
    assert apart.blame[-1].weight == blame.INCIDENT_POINTS
    apart = blame.add_incident(record, replace(entry, at=NOW + DAY), NOW + DAY)
    assert apart.blame[-1].weight == blame.LITTLE_POINTS


def test_appeal_keeps_the_evidence_and_takes_its_weight() -> None:
    record = blame.add(NodeRecordSpec(), blame.of_check(NOW, "c", "slow"), NOW)
    cleared = replace(record, cleared_at=NOW + 5, cleared_by="ann: cable replaced")
    assert blame.score(cleared, NOW + 10) == 0
    assert len(cleared.blame) == 1
    again = blame.add(cleared, blame.of_check(NOW + 20, "d", "slow"), NOW + 20)
    assert blame.score(again, NOW + 20) == blame.CHECK_POINTS


def test_a_bug_of_a_script_never_leads_to_quarantine() -> None:
    record = NodeRecordSpec()
    for number in range(30):
        one = incident("PythonException", detected_at=NOW + number * 60)
        entry = blame.of_incident(one, f"default/lm-{number}")
        assert entry is not None
        record = blame.add_incident(record, entry, NOW + number * 60)
    assert blame.score(record, NOW + 1800) < blame.LIMIT


ENTRIES = st.builds(
    BlameEntry,
    at=st.floats(NOW - 100 * DAY, NOW),
    kind=st.sampled_from(list(BlameKind)),
    source=st.sampled_from(["a", "b", "c"]),
    text=st.text(max_size=500),
    weight=st.floats(0.1, 5),
)


@given(st.lists(ENTRIES, max_size=80))
def test_ledger_stays_bounded_sorted_and_the_same_however_often_it_is_told(
    entries: list[BlameEntry],
) -> None:
    record = NodeRecordSpec()
    for entry in entries:
        record = blame.add(record, entry, NOW)
    assert len(record.blame) <= BLAME_MAX
    assert list(record.blame) == sorted(record.blame, key=lambda one: one.at)
    assert all(len(one.text) <= blame.TEXT_MAX for one in record.blame)
    assert all(NOW - one.at <= blame.FORGOTTEN_SECONDS for one in record.blame)
    again = record
    for entry in entries:
        again = blame.add(again, entry, NOW)
    assert again == record
