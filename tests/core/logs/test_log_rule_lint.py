"""Warnings about rules before a job has them, and a proof that none of them is wrong."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.core.logs.pattern_trees import NEVER, Unreadable, captures, read_pattern, shortest
from unbroken.core.logs.rule_lint import check_rules
from unbroken.core.logs.rule_sets import RuleSet, rule_sets
from unbroken.errors import SpecError
from unbroken.spec.patterns import Pattern

CORPUS = Path(__file__).parent / "log_corpus"
HANG = {"expectedStartCutOffInSeconds": 60, "expectedRecurringFrequencyInSeconds": 10}


def findings(*entries: dict[str, Any]) -> list[str]:
    rules = [{"name": f"r{i}", **entry} for i, entry in enumerate(entries)]
    found = check_rules(RuleSet("", "logMonitoringConfiguration", tuple(rules)))
    return [f"{one.severity.value} {one.path[29:]}: {one.what}" for one in found]


@cases
def test_findings(rule: dict[str, Any], expected: list[str]) -> None:
    found = findings(rule)
    assert len(found) == len(expected), found
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True)), found


def test_twins_are_told() -> None:
    rule = {"logPattern": ".*x", **HANG}
    assert findings(rule, rule) == ["warning : is rule r0 again"]
    named = {"name": "a", **rule}
    other = {**named, "logPattern": ".*y"}
    assert findings(named, other) == ["warning .name: another rule has this name"]


def test_the_documentations_rules_have_no_error_and_miss_nan() -> None:
    said = []
    for name in ("usage_fragments.yaml", "main_example.yaml"):
        for rules in rule_sets(list(yaml.safe_load_all((CORPUS / name).read_text()))):
            said += check_rules(rules)
    assert not [one for one in said if one.severity.value == "error"]
    blind = [one.rule for one in said if one.what == "group 1 does not take nan"]
    assert blind == ["LossSpikeDetection", "LowThroughputDetection"]


def test_rules_are_found_wherever_they_stand() -> None:
    rule = {"name": "r", "logPattern": ".*x"}
    inside = {"runPolicy": {"logMonitoringConfiguration": [rule]}}
    job = {
        "metadata": {"name": "j", "annotations": {"unbroken.dev/log-rule-ranks": "r=every"}},
        "spec": {"nprocPerNode": "8", "replicaSpecs": [{"replicas": 2}, {}], **inside},
    }
    found = rule_sets([job, inside, {"kind": "Pod"}, [rule], {"logMonitoringConfiguration": []}])
    assert [len(one.entries) for one in found] == [1, 1, 1, 0]
    first = found[0]
    assert (first.name, first.nnodes, first.nproc) == ("j", 3, 8)
    assert str(first.compiled()[0].watch) == "every"
    assert str(found[1].compiled()[0].watch) == "some"
    with pytest.raises(SpecError):
        rule_sets([{**job, "metadata": {"annotations": {"unbroken.dev/log-rule-ranks": "r"}}}])


ATOMS = ["a", "b", ".", "^", "$", r"\d", "[ab]", r"\n", r"\x1b", r"\b", r"\A"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=500)
@given(PATTERNS, st.text("ab1\t é", max_size=6))
def test_no_line_is_shorter_than_said(source: str, line: str) -> None:
    """Check that least lengths are right for every line, so that NEVER is never wrong."""
    least = shortest(read_pattern(source))
    with warnings.catch_warnings(action="ignore"):
        found = re.compile(source).match(line)
    assert found is None or len(found[0]) >= least
    if least == NEVER:
        assert not Pattern(source).is_match(line.encode())


@settings(max_examples=300)
@given(PATTERNS)
def test_groups_are_counted_as_python_does(source: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        groups = re.compile(source).groups
    assert [one.number for one, _, _ in captures(read_pattern(source))] == [
        number + 1 for number in range(groups)
    ]


@settings(max_examples=500)
@given(st.text(r"ab\(){}[]|*+?.^$:=!<>P\d1x,-", max_size=12))
def test_any_text_is_read_or_refused(source: str) -> None:
    with contextlib.suppress(Unreadable):
        read_pattern(source)
