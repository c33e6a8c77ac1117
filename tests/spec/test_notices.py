"""Marks on a Node that are notices of its loss, and their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.spec import keys
from unbroken.spec.nodes.notices import (
    NO_DEADLINE,
    NOTICES,
    Clock,
    ConditionFacts,
    Notice,
    NoticedNode,
    NoticeKind,
    Where,
    find_notice,
)

BEGAN = 1_000.0


def marked(kind: NoticeKind, value: str | None = None) -> NoticedNode:
    """A node with a notice of this kind."""
    value = kind.value or "x" if value is None else value
    match kind.where:
        case Where.UNSCHEDULABLE:
            return NoticedNode(is_unschedulable=True)
        case Where.TAINT:
            return NoticedNode(taints={kind.key: value})
        case Where.LABEL:
            return NoticedNode(labels={kind.key: value})
        case Where.ANNOTATION:
            return NoticedNode(annotations={kind.key: value})
        case Where.CONDITION:
            return NoticedNode(conditions={kind.key: ConditionFacts(value, BEGAN)})


@pytest.mark.parametrize("kind", NOTICES, ids=lambda kind: f"{kind.name} {kind.key}")
def test_each_kind_is_found_where_the_table_says(kind: NoticeKind) -> None:
    found = find_notice(marked(kind))
    assert found is not None
    assert (found.name, found.text) == (kind.name, kind.meaning)
    is_dated = kind.where is Where.CONDITION and kind.seconds is not None
    assert found.deadline == (BEGAN + (kind.seconds or 0) if is_dated else None)
    assert found.seconds == (None if is_dated else kind.seconds)


@pytest.mark.parametrize(
    "node",
    [
        NoticedNode(),
        NoticedNode(conditions={"KernelDeadlock": ConditionFacts("False", BEGAN)}),
        NoticedNode(conditions={"KernelDeadlock": ConditionFacts("Unknown", BEGAN)}),
        NoticedNode(conditions={"AcceleratedHardwareReady": ConditionFacts("True", BEGAN)}),
        NoticedNode(conditions={"KernelReady": ConditionFacts("Unknown", BEGAN)}),
        NoticedNode(taints={"DeletionCandidateOfClusterAutoscaler": "1700000000"}),
        NoticedNode(conditions={"FreezeScheduled": ConditionFacts("True", BEGAN)}),
        NoticedNode(labels={"dgxc.nvidia.com/nvsentinel-state": "remediation-succeeded"}),
        NoticedNode(taints={keys.HEALTH: "Unschedulable"}),
        NoticedNode(labels={keys.HEALTH: "Unschedulable"}),
        NoticedNode(labels={keys.HEALTH: "UnschedulablePendingReboot", keys.FAULT_TYPES: "Xid"}),
        NoticedNode(labels={keys.HEALTH: "UnschedulablePendingReboot", keys.DEEP_CHECK: "Failed"}),
        NoticedNode(taints={keys.NOT_READY: ""}),
    ],
)
def test_what_looks_like_a_notice_and_is_none(node: NoticedNode) -> None:
    assert find_notice(node) is None


def test_an_order_holds_beside_a_more_urgent_notice() -> None:
    labels = {keys.HEALTH: "UnschedulablePendingReplacement"}
    found = find_notice(
        NoticedNode(labels, taints={"cloud.google.com/impending-node-termination": ""})
    )
    assert found is not None
    assert (found.name, found.is_order) == ("GkeTermination", True)


def test_times_are_read_and_unreadable_ones_are_no_deadline() -> None:
    times = {"Drain": ("1970-01-01T00:20:00Z", NO_DEADLINE), "GkeMaintenance": ("1200", "soon")}
    timed = [kind for kind in NOTICES if kind.clock is not Clock.NONE]
    assert [kind.name for kind in timed] == list(times)
    for kind in timed:
        good, bad = times[kind.name]
        assert find_notice(marked(kind, good)) == Notice(kind.name, kind.meaning, 1200.0)
        for value in (bad, "", "nan", "1e400"):
            assert find_notice(marked(kind, value)) == Notice(kind.name, kind.meaning)


def test_the_earliest_deadline_counts_then_the_order_of_the_table() -> None:
    drained = {keys.DRAIN: "1970-01-01T00:20:00Z"}
    spot = {"aws-node-termination-handler/spot-itn": ""}
    facts = NoticedNode(annotations={keys.DRAIN: NO_DEADLINE}, is_unschedulable=True)
    assert find_notice(facts) == Notice("Drain", NOTICES[0].meaning)
    facts = NoticedNode(annotations={keys.DRAIN: NO_DEADLINE}, taints=spot, is_unschedulable=True)
    assert (found := find_notice(facts)) is not None
    assert found.name == "AwsSpot"
    preempted = {"PreemptScheduled": ConditionFacts("True", BEGAN)}
    both = find_notice(NoticedNode(annotations=drained, conditions=preempted))
    assert both is not None
    assert (both.name, both.deadline) == ("AksPreempt", BEGAN + 30)


def test_the_guide_lists_every_notice() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "planned-moves.md"
    text = guide.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for kind in NOTICES:
        assert any(kind.name in row and (kind.key in row or not kind.key) for row in rows), kind
        if kind.seconds is not None:
            assert any(kind.key in row and f"{kind.seconds:g} s" in row for row in rows), kind
