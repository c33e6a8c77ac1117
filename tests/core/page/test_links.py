"""The matrix of links: the newest measurement of each pair, the slowest first, in bounded size."""

from __future__ import annotations

from unbroken.core.nodes.checks.plan import BANDWIDTH, SUM
from unbroken.core.page.links import NODES_MAX, link_matrix, speeds
from unbroken.spec.nodes.kinds import CheckKind, CheckResult, Outcome


def pair(one: str, other: str, speed: float | None) -> list[CheckResult]:
    """Return the reports of both nodes of a pair; None: sums that were wrong."""
    outcome = Outcome.FAIL if speed is None else Outcome.PASS
    kind = CheckKind.CONNECTIVITY
    return [
        result
        for node, peer in ((one, other), (other, one))
        for result in (
            CheckResult(node, kind, SUM, outcome, 1.0, peer=peer),
            CheckResult(node, kind, BANDWIDTH, outcome, 1.0, measured=speed, peer=peer),
        )
    ]


def test_the_newest_measurement_of_each_pair_counts() -> None:
    found = link_matrix([pair("a", "b", 5.0) + pair("b", "c", 9.0), pair("b", "a", 10.0)])
    assert [(one.one, one.other, one.speed) for one in found.pairs] == [
        ("b", "c", 9.0),
        ("a", "b", 10.0),
    ]
    assert found.nodes == ("a", "b", "c")
    assert speeds(found) == [[None, 10.0, None], [10.0, None, 9.0], [None, 9.0, None]]


def test_a_pair_without_a_right_sum_is_the_slowest() -> None:
    found = link_matrix([pair("a", "b", 5.0) + pair("a", "c", None)])
    assert (found.pairs[0].other, found.pairs[0].speed) == ("c", 0.0)
    assert found.pairs[0].measured.is_right is False
    assert speeds(found)[0][2] == 0.0


def test_of_many_nodes_those_with_the_slowest_links_are_shown() -> None:
    results = [one for n in range(200) for one in pair(f"n{n:03}", f"m{n:03}", 200.0 - n)]
    found = link_matrix([results])
    assert len(found.nodes) == NODES_MAX
    assert found.nodes_all == 400
    assert "n199" in found.nodes
    assert "n000" not in found.nodes
    assert len(speeds(found)) == NODES_MAX


def test_without_checks_there_is_no_matrix() -> None:
    assert link_matrix([]) == link_matrix([[]])
    assert speeds(link_matrix([])) == []
