"""Which requests to fence a node are granted."""

from __future__ import annotations

import pytest

from unbroken.core.fencing import (
    FENCES_AN_HOUR,
    HOUR_SECONDS,
    Fence,
    FenceVerdict,
    advice,
    awaited,
    counts_as_dead,
    fence_verdict,
    is_overdue,
    proof_command,
)

NOW = 1_800_000_000.0
MANY = tuple(Fence(f"u{number}", NOW - number) for number in range(FENCES_AN_HOUR))
OLD = tuple(Fence(one.pod, one.at - HOUR_SECONDS) for one in MANY)
CASES = [
    ("a silent node", False, False, (), FenceVerdict.ASK),
    ("a ready node", True, False, (), FenceVerdict.READY),
    ("a ready node that was asked for", True, True, (), FenceVerdict.READY),
    ("a fence that was asked for", False, True, MANY, FenceVerdict.STANDS),
    ("the same pod", False, False, (Fence("new", 0.0),), FenceVerdict.REPEATED),
    ("one fence less than the limit", False, False, MANY[1:], FenceVerdict.ASK),
    ("the limit", False, False, MANY, FenceVerdict.TOO_OFTEN),
    ("the limit an hour ago", False, False, OLD, FenceVerdict.ASK),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_node_is_fenced_only_if_it_is_unwell_itself(
    case: tuple[str, bool, bool, tuple[Fence, ...], FenceVerdict],
) -> None:
    _, is_ready, is_asked_for, fences, expected = case
    assert fence_verdict(is_ready, is_asked_for, fences, "new", NOW) is expected


@pytest.mark.parametrize(
    ("silent_seconds", "dead_seconds", "is_dead"),
    [(None, 60.0, False), (59.0, 60.0, False), (60.0, 60.0, True), (1e9, 0.0, False)],
)
def test_a_node_counts_as_dead_only_by_the_word_of_who_runs_the_cluster(
    silent_seconds: float | None, dead_seconds: float, is_dead: bool
) -> None:
    assert counts_as_dead(silent_seconds, dead_seconds) is is_dead


def test_a_fence_that_is_not_given_within_a_minute_is_overdue() -> None:
    assert not is_overdue([Fence("u0", NOW - 300.0), Fence("u1", NOW - 59.0)], NOW)
    assert is_overdue([Fence("u0", NOW - 60.0)], NOW)
    assert "pod lm-0" in awaited("n0", "pod lm-0")
    assert proof_command("n0") in awaited("n0", "pod lm-0")


def test_a_person_is_told_what_to_do_where_nothing_more_is_done() -> None:
    for verdict in (FenceVerdict.REPEATED, FenceVerdict.TOO_OFTEN):
        text = advice(verdict, "n0", "pod lm-0 of TrainJob lm")
        assert "node n0" in text
        assert "pod lm-0 of TrainJob lm" in text
        command = "kubectl taint node n0 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        assert command in text
    assert not advice(FenceVerdict.READY, "n0", "any")
