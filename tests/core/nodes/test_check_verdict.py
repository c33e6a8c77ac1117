"""Results make a fault only if an error was seen, and if it is clear which node has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.nodes.checks.plan import RUN, Fleet, Step, steps_done, total_steps
from unbroken.core.nodes.checks.plan import next_steps as next_steps_with
from unbroken.core.nodes.checks.verdict import RESULTS_MAX, Conclusion, compact, faults_of
from unbroken.core.nodes.checks.verdict import conclude as conclude_with
from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, CheckResult, NodeCheckSpec, Outcome

BASIC, STRESS, PAIRS, TRAINING = CheckKind
PASS, FAIL, UNKNOWN = Outcome.PASS, Outcome.FAIL, Outcome.UNKNOWN


def result(node: str, test: str, outcome: Outcome, kind: CheckKind = BASIC) -> CheckResult:
    return CheckResult(node, kind, test, outcome, 1.0)


def trained(node: str, weights: str, cpu: str = "AVX2") -> CheckResult:
    text = f"loss=0x1.8p+0 weights={weights} torch=2.13.0+cpu cpu={cpu}"
    return CheckResult(node, TRAINING, "training-run", PASS, 1.0, text)


def met(one: str, other: str, speed: float, outcome: Outcome = PASS) -> list[CheckResult]:
    found = []
    for node, peer in ((one, other), (other, one)):
        found.append(CheckResult(node, PAIRS, "all-reduce", outcome, 1.0, peer=peer))
        if outcome is PASS:
            for test, amount in (("all-reduce-bandwidth", speed), ("all-reduce-latency", 200.0)):
                found.append(CheckResult(node, PAIRS, test, PASS, 1.0, "", amount, peer=peer))
    return found


def conclude(asked: NodeCheckSpec, results: Sequence[CheckResult]) -> Conclusion:
    """Return the conclusion about nodes without earlier results."""
    return conclude_with(asked, results, Fleet())


def next_steps(
    asked: NodeCheckSpec, results: Sequence[CheckResult], running: Collection[Step]
) -> list[Step]:
    """Return the next steps for nodes without earlier results."""
    return next_steps_with(asked, results, running, Fleet())


def spec(*nodes: str, kinds: Sequence[CheckKind] = (BASIC,)) -> NodeCheckSpec:
    return NodeCheckSpec(nodes, tuple(kinds))


def test_unknown_tests_fail_no_node() -> None:
    found = conclude(spec("a"), [result("a", "gpus", UNKNOWN), result("a", "disk", PASS)])
    assert (found.phase, found.faulty) == (CheckPhase.PASSED, ())


def test_a_node_of_whose_gpus_none_could_be_tested_has_not_passed() -> None:
    results = [
        result("a", "cpu-arithmetic", PASS, STRESS), result("a", "gpu-product", UNKNOWN, STRESS),
        result("b", "cpu-arithmetic", PASS, STRESS), result("b", "gpu0-product", PASS, STRESS),
        result("c", "cpu-arithmetic", PASS, STRESS),
        result("c", "gpu-product", Outcome.SKIPPED, STRESS),
    ]  # fmt: skip
    found = conclude(spec("a", "b", "c", kinds=(STRESS,)), results)
    assert [found.verdict(node) for node in "abc"] == [
        CheckPhase.UNKNOWN, CheckPhase.PASSED, CheckPhase.PASSED,
    ]  # fmt: skip


def test_a_check_without_a_verdict_says_why_for_each_node() -> None:
    no_driver = replace(
        result("a", "gpu-product", UNKNOWN, STRESS), message="no NVIDIA driver is installed here"
    )
    stopped = replace(result("c", RUN, UNKNOWN), message="there is no node c")
    results = [
        no_driver, replace(no_driver, node="b"), stopped,
        *(result(node, "cpu-arithmetic", PASS, STRESS) for node in "abd"),
    ]  # fmt: skip
    found = conclude(spec(*"abcd", kinds=(STRESS,)), results)
    reasons = "a, b (no NVIDIA driver is installed here); c (there is no node c)"
    assert (found.phase, found.message) == (CheckPhase.UNKNOWN, f"could not be judged: {reasons}")
    found = conclude(spec(*"abcd", kinds=(STRESS,)), [*results, result("d", "disk", FAIL)])
    assert (found.phase, found.faulty) == (CheckPhase.FAILED, ("d",))
    assert found.message == f"at fault: d; could not be judged: {reasons}"


def test_of_many_reasons_without_a_verdict_the_first_are_told() -> None:
    results = [
        replace(result(f"n{number}", RUN, UNKNOWN), message=f"reason {number}")
        for number in range(6)
    ]
    found = conclude(spec(*(one.node for one in results)), results)
    assert found.message.endswith("n2 (reason 2); n3; n4; n5")
    assert found.doubts["n5"] == "reason 5"


def test_a_failed_test_is_its_nodes_fault() -> None:
    results = [result("a", "disk", PASS), result("b", "disk", FAIL), result("b", "gpus", UNKNOWN)]
    found = conclude(spec("a", "b"), results)
    assert (found.phase, found.faulty) == (CheckPhase.FAILED, ("b",))
    assert found.verdict("a") is CheckPhase.PASSED
    assert [one.test for one in faults_of("b", found.results)] == ["disk"]


def test_tests_that_were_cut_short_are_nobodys_fault() -> None:
    results = [result("a", "disk", PASS), result("a", RUN, UNKNOWN), result("b", "disk", PASS)]
    found = conclude(spec("a", "b"), results)
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())
    assert "a" in found.message


def test_the_slow_node_is_named_with_what_was_measured_and_expected() -> None:
    nodes = ("a", "b", "c", "d")
    results = [*met("a", "b", 9.0), *met("c", "d", 2.0), *met("a", "c", 8.0), *met("b", "d", 2.1)]
    found = conclude(spec(*nodes, kinds=[PAIRS]), results)
    assert found.faulty == ("d",)
    (fault,) = faults_of("d", found.results)
    assert (fault.measured, fault.expected, fault.unit) == (2.1, 4.5, "GB/s")
    assert fault.message == "with b: 2.1 GB/s, expected 4.5; with c: 2.0 GB/s, expected 4.5"
    assert not any(one.outcome is FAIL for one in found.results if one.node != "d")


def test_of_two_nodes_that_cannot_meet_either_may_be_at_fault() -> None:
    found = conclude(spec("a", "b", kinds=[PAIRS]), met("a", "b", 0.0, FAIL))
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())
    assert any("either may be at fault" in one.message for one in found.results)


def test_one_node_alone_has_nobody_to_meet_and_is_not_held_back_by_it() -> None:
    results = [result("a", "disk", PASS)]
    found = conclude(spec("a", kinds=[BASIC, PAIRS]), results)
    assert found.phase is CheckPhase.PASSED
    assert any("needs two nodes" in one.message for one in found.results)


def test_the_odd_one_of_three_runs_is_named() -> None:
    found = conclude(
        spec("a", "b", "c", kinds=[TRAINING]),
        [trained("a", "11"), trained("b", "22"), trained("c", "11")],
    )
    assert found.faulty == ("b",)
    assert "weights 22, expected" in faults_of("b", found.results)[0].message


def test_what_else_a_run_says_is_not_compared() -> None:
    odd = trained("c", "22")
    odd = replace(odd, message=f"{odd.message}; planted: something")
    found = conclude(
        spec("a", "b", "c", kinds=[TRAINING]), [trained("a", "1"), trained("b", "1"), odd]
    )
    assert found.faulty == ("c",)


def test_of_two_runs_that_differ_neither_is_named() -> None:
    found = conclude(spec("a", "b", kinds=[TRAINING]), [trained("a", "11"), trained("b", "22")])
    assert (found.phase, found.faulty) == (CheckPhase.UNKNOWN, ())


def test_runs_of_other_processors_are_not_compared() -> None:
    runs = [trained("a", "11"), trained("b", "11"), trained("c", "22", cpu="AVX512")]
    found = conclude(spec("a", "b", "c", kinds=[TRAINING]), runs)
    assert (found.phase, found.faulty) == (CheckPhase.PASSED, ())


@given(st.lists(st.sampled_from(["1", "2", "3"]), min_size=1, max_size=9))
def test_a_run_in_the_majority_is_never_named(weights: list[str]) -> None:
    nodes = [f"n{number}" for number in range(len(weights))]
    runs = [trained(node, text) for node, text in zip(nodes, weights, strict=True)]
    found = conclude(spec(*nodes, kinds=[TRAINING]), runs)
    for node, text in zip(nodes, weights, strict=True):
        if 2 * weights.count(text) >= len(weights):
            assert node not in found.faulty


def test_a_slow_node_that_meets_everybody_does_not_make_slow_usual() -> None:
    results = [*met("a", "b", 9.0), *met("a", "c", 1.0), *met("b", "c", 1.1)]
    assert conclude(spec("a", "b", "c", kinds=[PAIRS]), results).faulty == ("c",)


def test_of_very_many_results_is_kept_what_the_verdict_needs() -> None:
    nodes = [f"n{number:04}" for number in range(RESULTS_MAX // 4)]
    results = [result(node, f"t{number}", PASS) for node in nodes for number in range(5)]
    results += [result("n0003", "disk", FAIL), result("n0004", RUN, UNKNOWN)]
    results += [result("n0005", "gpu-product", UNKNOWN)]
    results += met("n0001", "n0002", 3.0)
    asked = spec(*nodes)
    kept = compact(results)
    assert len(kept) == len(nodes) + 3 + 6
    assert compact(kept) == kept
    whole, part = conclude(asked, results), conclude(asked, kept)
    assert replace(part, results=()) == replace(whole, results=())
    assert next_steps(asked, kept, []) == next_steps(asked, results, []) == []
    assert compact(results[:10]) == tuple(results[:10])


def test_kinds_follow_each_other_and_pairs_come_last() -> None:
    asked = spec("a", "b", kinds=[BASIC, PAIRS, STRESS])
    assert next_steps(asked, [], []) == [Step(("a",), BASIC), Step(("b",), BASIC)]
    basic = [result("a", "disk", PASS)]
    assert next_steps(asked, basic, [Step(("b",), BASIC)]) == [Step(("a",), STRESS)]
    rest = [result("b", "disk", PASS), *(result(node, "cpu", PASS, STRESS) for node in "ab")]
    assert next_steps(asked, [*basic, *rest], []) == [Step(("a", "b"), PAIRS)]
    done = [*basic, *rest, *met("a", "b", 1.0)]
    assert next_steps(asked, done, []) == []
    assert (steps_done(done), total_steps(asked)) == (5, 5)


def test_a_faulty_node_is_tested_no_further_and_meets_nobody() -> None:
    asked = spec("a", "b", "c", kinds=[BASIC, STRESS, PAIRS])
    results = [result("a", "disk", FAIL)]
    results += [result(node, "x", PASS, kind) for node in "bc" for kind in (BASIC, STRESS)]
    assert next_steps(asked, results, []) == [Step(("b", "c"), PAIRS)]
