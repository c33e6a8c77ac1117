"""A slow device of a node, or a slow link between two of them, is named; a slow design is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.nodes.checks.devices import (
    DevicePair,
    Slow,
    bus_bandwidth,
    rounds_of_links,
    slow_lanes,
    slow_parts,
    slow_text,
)
from unbroken.core.nodes.checks.plan import (
    DEVICE_BANDWIDTH,
    FLEET_SHARE,
    Fleet,
    compare_devices,
    learn,
    next_steps,
)
from unbroken.core.nodes.checks.verdict import conclude, faults_of
from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, CheckResult, NodeCheckSpec, Outcome

STRESS = CheckKind.STRESS
BIG = "ml.p5.48xlarge"


@pytest.mark.parametrize(
    ("size", "seconds", "ranks", "expected"),
    [
        # Lines of nccl-tests' output: of HyperPod's documents, and of two machines with 8 GPUs.
        (2147483648, 1.804971, 2, 1.19),
        (8589934592, 0.040, 16, 402.65),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(
    size: int, seconds: float, ranks: int, expected: float
) -> None:
    assert bus_bandwidth(size, seconds, ranks) == pytest.approx(expected, rel=1e-3)


@given(st.integers(2, 17))
def test_every_device_meets_every_other_once_and_one_at_a_time(count: int) -> None:
    rounds = rounds_of_links(count)
    assert sorted(pair for links in rounds for pair in links) == [*combinations(range(count), 2)]
    for links in rounds:
        devices = [device for pair in links for device in pair]
        assert len(devices) == len(set(devices))
    assert len(rounds) == count - 1 + count % 2


def links_of(count: int, speed: float = 200.0) -> dict[DevicePair, float]:
    return dict.fromkeys(combinations(range(count), 2), speed)


@given(st.integers(3, 16), st.data())
def test_the_one_slow_device_is_named_and_no_other(count: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, count - 1))
    noise = st.floats(0.61, 1.0)  # just above 0.6: exactly half as fast is not slow
    speeds = {
        pair: speed * data.draw(noise) * (0.3 if slow in pair else 1.0)
        for pair, speed in links_of(count).items()
    }
    assert [one.devices for one in slow_parts(speeds)] == [(slow,)]


@given(st.integers(3, 16), st.data())
def test_nothing_is_named_where_no_link_is_half_as_fast_as_another(
    count: int, data: st.DataObject
) -> None:
    speeds = {
        pair: speed * data.draw(st.floats(0.51, 1)) for pair, speed in links_of(count).items()
    }
    assert slow_parts(speeds) == []


@given(st.integers(4, 16), st.data())
def test_a_single_slow_link_is_named_by_its_two_devices(count: int, data: st.DataObject) -> None:
    pair = data.draw(st.sampled_from([*combinations(range(count), 2)]))
    found = slow_parts({**links_of(count), pair: 20.0})
    assert found == [Slow(pair, 20.0, 50.0)]
    assert slow_text(found[0]) == (
        f"the link between devices {pair[0]} and {pair[1]} is slow: 20 GB/s, expected 50"
    )


def test_a_machine_that_is_built_of_fast_and_slow_links_is_good() -> None:
    """DGX-1: each V100 has four others by NVLink, two of them by two links, and three by PCIe."""
    double = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (2, 6), (3, 7), (4, 7), (5, 6), (4, 5)}
    single = {(0, 1), (0, 2), (1, 3), (4, 6), (5, 7), (6, 7)}
    speeds = dict.fromkeys(combinations(range(8), 2), 9.0)
    speeds |= dict.fromkeys(double, 45.0) | dict.fromkeys(single, 23.0)
    assert slow_parts(speeds) == []


def test_of_two_devices_neither_is_named() -> None:
    assert slow_parts({(0, 1): 0.1}) == []


def test_the_slow_lane_to_another_node_is_named() -> None:
    lanes = dict.fromkeys(range(8), 45.0)
    assert slow_lanes(lanes) == []
    assert slow_lanes({**lanes, 3: 12.0}) == [], "cards are shared: a quarter is not reached"
    (found,) = slow_lanes({**lanes, 3: 10.0})
    assert slow_text(found, "n7") == (
        "the link between device 3 and that of n7 is slow: 10 GB/s, expected 11.25"
    )


def together(node: str, speed: float, backend: str = "nccl") -> CheckResult:
    result = CheckResult(node, STRESS, DEVICE_BANDWIDTH, Outcome.PASS, 1.0, "8 processes", speed)
    return replace(result, unit="GB/s", backend=backend)


def test_a_node_whose_devices_are_slow_together_is_named_beside_its_equals() -> None:
    types = dict.fromkeys("abcd", BIG)
    results = [*(together(node, 440.0) for node in "abc"), together("d", 200.0)]
    asked = NodeCheckSpec(tuple("abcd"), (STRESS, CheckKind.CONNECTIVITY))
    fleet = Fleet(types)
    found = conclude(asked, results, fleet)
    assert found.faulty == ("d",)
    [fault] = faults_of("d", found.results)
    assert (fault.measured, fault.expected, fault.unit) == (200.0, 220.0, "GB/s")
    steps = next_steps(asked, results, [], fleet)
    assert {node for step in steps for node in step.nodes} == {"a", "b"}, "d meets nobody"


def test_a_told_limit_holds_for_one_node_alone_and_without_gpus() -> None:
    fleet = Fleet({"a": BIG}, inside={BIG: 1.0})
    for speed, phase in ((0.9, CheckPhase.FAILED), (1.0, CheckPhase.PASSED)):
        asked, results = NodeCheckSpec(("a",), (STRESS,)), [together("a", speed, "gloo")]
        assert conclude(asked, results, fleet).phase is phase


def test_what_the_type_has_shown_in_earlier_checks_counts_for_one_alone() -> None:
    fleet = Fleet({"a": BIG}, inside_learned=learn([(BIG, 400.0)] * 3))
    [slow] = compare_devices([together("a", 399.0 * FLEET_SHARE)], fleet)
    assert (slow.outcome, slow.expected) == (Outcome.FAIL, 100.0)


def test_processors_are_not_compared_as_devices() -> None:
    results = [*(together(node, 4.0, "gloo") for node in "abc"), together("d", 0.5, "gloo")]
    assert compare_devices(results, Fleet(dict.fromkeys("abcd", BIG))) == []
