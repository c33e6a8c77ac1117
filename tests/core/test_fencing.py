"""Which requests to fence a node are granted."""

from __future__ import annotations

import pytest

from unbroken.core.fencing import (
    FENCES_AN_HOUR,
    HOUR_SECONDS,
    Fence,
    FenceVerdict,
    advice,
    fence_verdict,
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


def test_a_person_is_told_what_to_do_where_nothing_more_is_done() -> None:
    for verdict in (FenceVerdict.REPEATED, FenceVerdict.TOO_OFTEN):
        text = advice(verdict, "n0", "pod lm-0 of TrainJob lm")
        assert "node n0" in text
        assert "pod lm-0 of TrainJob lm" in text
        assert "give it the taint node.kubernetes.io/out-of-service" in text
    assert not advice(FenceVerdict.READY, "n0", "any")
