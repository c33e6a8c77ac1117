"""Log rules as they are written: forms, problems, warnings, watched ranks, the job as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.logs.hanging_rules import hanging_rules
from unbroken.core.logs.rule_config import read_rules
from unbroken.errors import SpecError
from unbroken.spec.job.types import RuleScope, RuleWatch, read_watches, watch_of
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import read_record, write_record
from unbroken.wire.agent import RuleState, RuleView

GOOD: dict[str, Any] = {"name": "good", "logPattern": "loss", "faultOnMatch": True}

BROKEN = {
    "no object": ("loss", ""),
    "no name": ({"logPattern": "x"}, ".name"),
    "no pattern": ({"name": "x"}, ".logPattern"),
    "a bad pattern": ({**GOOD, "logPattern": "("}, ".logPattern"),
    "a bad stop pattern": ({**GOOD, "stopPattern": "["}, ".stopPattern"),
    "an unknown operator": ({**GOOD, "operator": "ne"}, ".operator"),
    "a threshold that is no number": ({**GOOD, "metricThreshold": "high"}, ".metricThreshold"),
    "a threshold that is NaN": ({**GOOD, "metricThreshold": float("nan")}, ".metricThreshold"),
    "no data points": (
        {**GOOD, "metricEvaluationDataPoints": 0},
        ".metricEvaluationDataPoints",
    ),
    "a negative time": (
        {**GOOD, "expectedStartCutOffInSeconds": -1},
        ".expectedStartCutOffInSeconds",
    ),
    "an unknown field": ({**GOOD, "logPatern": "x"}, ".logPatern"),
    "unknown ranks": ({**GOOD, "ranks": "most"}, ".ranks"),
}


@pytest.mark.parametrize(("entry", "place"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_named_and_leaves_the_others_alone(entry: object, place: str) -> None:
    report = Report()
    rules = read_rules([GOOD, entry, GOOD], report)
    assert [rule.spec.name for rule in rules] == ["good", "good"]
    assert f"logMonitoringConfiguration[1]{place}" in {problem.path for problem in report.problems}


def test_numbers_may_be_written_as_text_and_need_not_be_whole() -> None:
    report = Report()
    texts = {"metricThreshold": "0.5", "expectedRecurringFrequencyInSeconds": 2.5}
    (rule,) = read_rules([{**GOOD, **texts, "operator": "gt", "faultOnMatch": "false"}], report)
    assert report.problems == []
    assert rule.spec.metric_threshold == 0.5
    assert rule.spec.expected_recurring_frequency_in_seconds == 2.5
    assert not rule.spec.fault_on_match


WARNED = {
    "a threshold without a group": (
        {**GOOD, "metricThreshold": 1, "operator": "gt"},
        "a capture group",
    ),
    "a rule without effect": ({**GOOD, "faultOnMatch": False}, "never find a fault"),
    "0 seconds": ({**GOOD, "expectedStartCutOffInSeconds": 0}, "no limit"),
    "a pattern that takes everything": ({**GOOD, "logPattern": ".*"}, "every line"),
}


@pytest.mark.parametrize(("entry", "words"), WARNED.values(), ids=WARNED)
def test_what_is_accepted_and_yet_odd_is_told(entry: object, words: str) -> None:
    report = Report()
    assert len(read_rules([entry], report)) == 1
    assert report.problems == []
    assert len(report.warnings) == 1
    assert words in report.warnings[0]


def test_a_good_rule_has_no_warning() -> None:
    report = Report()
    read_rules([GOOD], report)
    assert (report.problems, report.warnings) == ([], [])


def test_watched_ranks_by_rule_name() -> None:
    watches = read_watches("GPU Error = every; a=b=0,8; *=node;")
    assert watch_of("GPU Error", watches) == RuleWatch(RuleScope.RANK)
    assert watch_of("a=b", watches) == RuleWatch(RuleScope.RANK, frozenset({0, 8}))
    assert watch_of("other", watches) == RuleWatch(RuleScope.NODE)
    assert watch_of("other", {}) == RuleWatch(RuleScope.JOB)


@pytest.mark.parametrize("text", ["every", "=every", "a=", "a=1,,2", "a=-1", "a=most", "a=1.5"])
def test_what_says_nothing_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        read_watches(text)


@pytest.mark.parametrize("text", ["some", "node", "every", "0,8"])
def test_watched_ranks_read_as_written(text: str) -> None:
    (rule,) = read_rules([{**GOOD, "ranks": text}], Report())
    assert str(rule.watch) == text


HEARD, LOST, NEVER, OVERDUE, OVER = "heard", "lost", "never", "overdue", "over"
SEEN = {
    HEARD: (RuleState.HEALTHY, 5),
    LOST: (RuleState.HANGING, 5),
    NEVER: (RuleState.WAITING, 0),
    OVERDUE: (RuleState.HANGING, 0),
    OVER: (RuleState.STOPPED, 5),
}
JOBS = {
    "one node still hears it": ([LOST, HEARD], False),
    "the only node that heard it has lost it": ([LOST, NEVER, NEVER], True),
    "a node never heard what another does": ([HEARD, OVERDUE, NEVER], False),
    "all that heard it have lost it": ([LOST, LOST, OVERDUE], True),
    "nobody ever heard it": ([OVERDUE, OVERDUE], True),
    "the cut-off of one is not over": ([OVERDUE, NEVER], False),
    "it is over on one": ([LOST, OVER], False),
}


def view(state: RuleState, matches: int, ranks: str = "some") -> RuleView:
    return RuleView("r", state, ranks, matches)


@pytest.mark.parametrize(("nodes", "is_hang"), JOBS.values(), ids=JOBS)
def test_the_job_as_a_whole_hangs(nodes: list[str], is_hang: bool) -> None:
    views = [[view(*SEEN[node])] for node in nodes]
    assert hanging_rules(views) == (("r",) if is_hang else ())


def test_a_node_that_has_not_said_anything_speaks_against_a_hang() -> None:
    assert hanging_rules([[view(*SEEN[LOST])], []]) == ()


def test_rules_of_nodes_and_ranks_are_no_affair_of_the_job() -> None:
    assert hanging_rules([[view(*SEEN[LOST], "node"), view(*SEEN[LOST], "every")]]) == ()


def test_two_rules_of_one_name_are_two_rules() -> None:
    node = [view(*SEEN[HEARD]), view(*SEEN[LOST])]
    assert hanging_rules([node, node]) == ("r",)
    assert hanging_rules([node, node[::-1]]) == ()


def test_a_view_survives_the_wire() -> None:
    report = Report()
    before = RuleView("r", RuleState.SLOW, "0,8", 3, 2, 1, 17.25, 8, "stderr", "loss=1", "1")
    assert read_record(RuleView, write_record(before), "", report) == before
    assert report.problems == []
