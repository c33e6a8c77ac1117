"""Limits of a link: those of its instance type, published or learned, and no higher ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.nodes.checks.plan import (
    BANDWIDTH,
    BANDWIDTH_QUEUED,
    DEVICE_LINKS,
    FLEET_LEAST,
    FLEET_SHARE,
    LATENCY,
    LATENCY_QUEUED,
    SUM,
    Fleet,
    Link,
    LinkLimits,
    NodePair,
    learn,
    limits_of,
    links,
    measured_pairs,
    next_steps,
    speeds_shown,
)
from unbroken.core.nodes.checks.plan import Measured as Seen
from unbroken.core.nodes.checks.verdict import Conclusion, conclude, faults_of
from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, CheckResult, NodeCheckSpec, Outcome

PAIRS = CheckKind.CONNECTIVITY
BIG, SMALL = "ml.p5.48xlarge", "ml.c5.2xlarge"
USUAL = {BIG: 40.0, SMALL: 1.0}


def met(
    pair: NodePair,
    speed: float,
    backend: str = "gloo",
    latency: float = 100.0,
    queued: tuple[float, float] = (0.0, 0.0),
) -> list[CheckResult]:
    """Return the results of two nodes' tests with each other; `queued` in percent for each."""
    tests = (
        (SUM, None),
        (BANDWIDTH, speed),
        (LATENCY, latency),
        (BANDWIDTH_QUEUED, queued[0]),
        (LATENCY_QUEUED, queued[1]),
    )
    return [
        CheckResult(
            node,
            PAIRS,
            test,
            Outcome.PASS,
            1.0,
            "16 processes",
            amount,
            peer=peer,
            backend=backend,
        )
        for node, peer in (pair, pair[::-1])
        for test, amount in tests
    ]


def check(
    types: Mapping[str, str], slow: Mapping[str, float] | None = None, fleet: Fleet | None = None
) -> tuple[Conclusion, list[CheckResult]]:
    """Carry out a check of links; each node has the speed of its type or that of `slow`."""
    speeds = {node: USUAL[kind] for node, kind in types.items()} | dict(slow or {})
    known = fleet or Fleet(types)
    asked = NodeCheckSpec(tuple(types), (PAIRS,))
    results: list[CheckResult] = []
    while steps := next_steps(asked, results, [], known):
        for step in steps:
            one, other = step.nodes
            results += met((one, other), min(speeds[one], speeds[other]))
    return conclude(asked, results, known), results


def test_a_smaller_type_is_not_held_to_what_a_bigger_one_can() -> None:
    types = {"head": SMALL, "w1": BIG, "w2": BIG, "w3": BIG, "w4": BIG}
    found, _ = check(types)
    assert (found.phase, found.faulty) == (CheckPhase.PASSED, ())


def test_a_slow_node_is_found_among_those_of_its_type() -> None:
    types = {"head": SMALL, "other": SMALL, **{f"w{n}": BIG for n in range(5)}}
    found, _ = check(types, {"w1": 10.0})
    assert found.faulty == ("w1",)
    [fault] = faults_of("w1", found.results)
    assert (fault.measured, fault.expected) == (10.0, 20.0)


@given(
    st.dictionaries(st.integers(0, 30).map("n{}".format), st.sampled_from([BIG, SMALL]), min_size=1)
)
def test_nobody_is_named_where_every_node_does_as_its_type_does(types: dict[str, str]) -> None:
    found, _ = check(types)
    assert found.faulty == ()
    expected = CheckPhase.PASSED if len(types) > 1 else CheckPhase.UNKNOWN
    assert found.phase is expected


@given(st.integers(4, 12), st.integers(0, 3), st.data())
def test_a_slow_one_of_four_or_more_is_named_whoever_else_is_there(
    big: int, small: int, data: st.DataObject
) -> None:
    types = {**{f"b{n}": BIG for n in range(big)}, **{f"a{n}": SMALL for n in range(small)}}
    bad = f"b{data.draw(st.integers(0, big - 1))}"
    found, _ = check(types, {bad: 5.0})
    assert found.faulty == (bad,)


def test_two_that_are_slow_beside_what_their_type_has_shown_are_not_passed_nor_named() -> None:
    types = {"a": BIG, "b": BIG}
    fleet = Fleet(types, learned=learn([(BIG, 38.0), (BIG, 40.0), (BIG, 41.0)]))
    found, _ = check(types, {"a": 9.0}, fleet)
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())
    assert any("9.0 GB/s, expected 10.0" in one.message for one in found.results)
    assert check(types, {"a": 11.0}, fleet)[0].phase is CheckPhase.PASSED


def test_what_a_person_says_counts_above_what_is_learned() -> None:
    types = {f"n{n}": BIG for n in range(4)}
    slow = {"n1": 15.0}
    assert check(types, slow)[0].faulty == ("n1",)
    assert check(types, slow, Fleet(types, {BIG: 14.0}))[0].phase is CheckPhase.PASSED
    strict = Fleet(types, {BIG: 50.0})
    found, _ = check(types, slow, strict)
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())


@pytest.mark.parametrize(("backend", "least"), [("nccl", 80.0), ("gloo", None)])
def test_a_published_limit_is_one_of_gpus(backend: str, least: float | None) -> None:
    types = {"a": BIG, "b": BIG}
    pairs = measured_pairs(met(("a", "b"), 30.0, backend))
    limits = limits_of(pairs, Fleet(types, published={BIG: 80.0}))
    assert limits.of("a") == least
    assert links(pairs, limits)["a", "b"] is (Link.BAD if least else Link.GOOD)
    told = Fleet(types, {BIG: 20.0}, published={BIG: 80.0})
    assert limits_of(pairs, told).of("a") == 20.0, "what a person says counts above it"


def test_the_device_of_a_slow_lane_is_named_with_its_node() -> None:
    """Name the device, though the sum over all devices is normal: one lane of eight is slow."""
    types = {f"n{number}": BIG for number in range(4)}
    asked, fleet = NodeCheckSpec(tuple(types), (PAIRS,)), Fleet(types)
    results: list[CheckResult] = []
    while steps := next_steps(asked, results, [], fleet):
        for one, other in (step.nodes for step in steps):
            results += met((one, other), 40.0, "nccl")
            if "n2" in (one, other):
                text = "the link between device 3 and that of the other is slow"
                peer = other if one == "n2" else one
                results.append(
                    CheckResult("n2", PAIRS, DEVICE_LINKS, Outcome.FAIL, 1.0, text, peer=peer)
                )
    found = conclude(asked, results, fleet)
    assert found.faulty == ("n2",)
    [fault] = faults_of("n2", found.results)
    assert fault.message.count("the link between device 3 and that") == 2


def test_a_node_with_only_slower_company_is_not_held_back() -> None:
    types = {"a": SMALL, "b": BIG}
    found, _ = check(types, fleet=Fleet(types, {BIG: 30.0}))
    assert found.phase is CheckPhase.PASSED
    [open_one] = [one for one in found.results if one.node == "b" and not one.peer]
    assert open_one.outcome is Outcome.UNKNOWN
    assert open_one.message == (
        "with a: 1.0 GB/s, expected 30.0; nothing is known of what that one's type can"
    )


def test_only_meetings_within_a_type_show_what_it_can() -> None:
    types = {"a": SMALL, "b": BIG, "c": BIG}
    _, results = check(types)
    assert speeds_shown(results, Fleet(types)) == {"b": 40.0, "c": 40.0}


def test_a_fleet_is_learned_from_three_nodes_of_a_type_with_a_name() -> None:
    assert learn([(BIG, 40.0)] * (FLEET_LEAST - 1)) == {}
    assert learn([("", 40.0)] * FLEET_LEAST) == {}
    shown = [(BIG, 40.0), (BIG, 2.0), (BIG, 44.0), (SMALL, 1.0)]
    assert learn(shown) == {BIG: 40.0 * FLEET_SHARE}


@pytest.mark.parametrize(("speeds", "expected"), [([5.0], None), ([1.0, 8.0], 4.0)])
def test_what_is_usual_is_learned_from_two_pairs_or_more(
    speeds: Iterable[float], expected: float | None
) -> None:
    pairs = {(f"a{n}", f"b{n}"): Seen(True, speed, 100.0) for n, speed in enumerate(speeds)}
    assert limits_of(pairs, Fleet()).of("a0") == expected


def test_a_busy_machines_latency_is_no_fault() -> None:
    delays = enumerate((50.0, 60.0, 1900.0))
    limits = limits_of({(f"a{n}", f"b{n}"): Seen(True, 1.0, delay) for n, delay in delays}, Fleet())
    assert limits.latency == 2000.0
    assert not limits.is_late(Seen(True, 1.0, 1999.0))
    assert limits.is_late(Seen(True, 1.0, 2001.0))


@pytest.mark.parametrize(
    ("speed", "latency", "queued", "expected"),
    [
        (8.0, 100.0, (0.0, 0.0), Link.BAD),
        (8.0, 100.0, (29.0, 0.0), Link.BAD),
        (8.0, 100.0, (31.0, 0.0), Link.UNKNOWN),
        (8.0, 100.0, (100.0, 0.0), Link.UNKNOWN),
        (0.5, 100.0, (31.0, 90.0), Link.BAD),
        (30.0, 5000.0, (0.0, 29.0), Link.BAD),
        (30.0, 5000.0, (0.0, 31.0), Link.UNKNOWN),
        (30.0, 5000.0, (90.0, 0.0), Link.BAD),
        (8.0, 5000.0, (31.0, 31.0), Link.UNKNOWN),
        (8.0, 5000.0, (31.0, 0.0), Link.BAD),
        (30.0, 100.0, (100.0, 100.0), Link.GOOD),
    ],
)
def test_what_waiting_for_processors_explains_is_held_against_nobody(
    speed: float, latency: float, queued: tuple[float, float], expected: Link
) -> None:
    """`queued` is the percentage at each end. With 31 % at both, 38 % of the time was measured."""
    limits = LinkLimits({"a": BIG, "b": BIG}, {BIG: 20.0}, 2000.0)
    pairs = measured_pairs(met(("a", "b"), speed, "gloo", latency, queued))
    assert links(pairs, limits)["a", "b"] is expected


def test_two_that_had_no_processor_are_not_named_and_the_reason_is_said() -> None:
    types = {f"n{number}": BIG for number in range(4)}
    asked, fleet = NodeCheckSpec(tuple(types), (PAIRS,)), Fleet(types)
    results: list[CheckResult] = []
    while steps := next_steps(asked, results, [], fleet):
        for step in steps:
            one, other = step.nodes
            is_busy = "n2" in (one, other)
            results += met((one, other), 10.0 if is_busy else 40.0, queued=(40.0 * is_busy, 0.0))
    found = conclude(asked, results, fleet)
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())
    [said] = [one for one in found.results if one.node == "n2" and not one.peer]
    assert "10.0 GB/s, expected 20.0; no processor was free" in said.message


def test_a_pair_says_of_each_node_what_it_can_say() -> None:
    limits = LinkLimits({"a": SMALL, "b": BIG}, {BIG: 20.0}, None)
    said = links(measured_pairs(met(("a", "b"), 1.0)), limits)
    assert said == {("a", "b"): Link.GOOD, ("b", "a"): Link.UNKNOWN}
