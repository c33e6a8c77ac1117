"""Log rules in an annotation: forms that are read, and what is refused with its place."""

from __future__ import annotations

import json

import pytest

from unbroken.spec.job.types import LogRule
from unbroken.spec.log_monitoring import (
    PATH,
    RULES_MAX,
    TEXT_CHARACTERS_MAX,
    log_monitoring_of,
    read_log_monitoring,
)

RULE = {"name": "Steps", "logPattern": ".*step=", "expectedRecurringFrequencyInSeconds": 60}
READ = LogRule("Steps", ".*step=", expected_recurring_frequency_in_seconds=60)
YAML = """\
- name: Steps
  logPattern: '.*step='
  expectedRecurringFrequencyInSeconds: 60
"""
FIRST = f"{PATH}.logMonitoringConfiguration[0]"


@pytest.mark.parametrize(
    "text",
    [
        YAML,
        json.dumps([RULE]),
        json.dumps({"logMonitoringConfiguration": [RULE]}),
        "logMonitoringConfiguration:\n" + YAML,
    ],
)
def test_rules_are_read_from_yaml_and_json(text: str) -> None:
    found = read_log_monitoring(text)
    assert found.problems == ()
    assert found.rules == (READ,)


@pytest.mark.parametrize("annotations", [{}, {PATH.partition("[")[2][:-1]: "  \n"}])
def test_a_job_without_rules_has_no_problem(annotations: dict[str, str]) -> None:
    found = log_monitoring_of(annotations)
    assert (found.rules, found.problems) == ((), ())


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("- name: [", PATH, "is not YAML: line 2, column 1"),
        ("a: &a [x]\nb: *a\n", PATH, "aliases"),
        ("[" * 5000, PATH, "is not YAML"),
        ("x" * (TEXT_CHARACTERS_MAX + 1), PATH, "longer than"),
        ("7", PATH, "must be a list"),
        ("name: Steps", PATH, "must be a list"),
        (json.dumps([RULE] * (RULES_MAX + 1)), PATH, f"at most {RULES_MAX} rules"),
        ("[7]", FIRST, "must be an object"),
        (json.dumps([{**RULE, "logPattern": "(?=x)"}]), f"{FIRST}.logPattern", "look-ahead"),
        (json.dumps([{"name": "Steps"}]), f"{FIRST}.logPattern", "Required value"),
        (json.dumps([{**RULE, "logpattern": "x"}]), f"{FIRST}.logpattern", "did you mean"),
        (json.dumps([{**RULE, "metricThreshold": 3}]), f"{FIRST}.operator", "needs an operator"),
        (
            json.dumps([RULE, RULE]),
            f"{PATH}.logMonitoringConfiguration[1].name",
            'Duplicate value: "Steps"',
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(text: str, path: str, words: str) -> None:
    found = read_log_monitoring(text)
    assert found.rules == ()
    (problem,) = [one for one in found.problems if one.path == path]
    assert words in problem.message


def test_one_bad_rule_refuses_all_and_every_problem_is_named() -> None:
    bad = [
        {**RULE, "name": "a", "logPattern": "("},
        RULE,
        {**RULE, "name": "b", "stopPattern": "["},
    ]
    found = read_log_monitoring(json.dumps(bad))
    assert found.rules == ()
    assert len(found.problems) == 2
