"""Validation of the rules of `logMonitoringConfiguration` (HyperPod agent 1.1.3).

The stock agent drops all rules if one is bad, and reports that in a file of its own; here each is
checked before the job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.patterns import (
    COSTLY_ITEMS_MAX,
    PATTERN_CHARACTERS_MAX,
    PROGRAM_SIZE_MAX,
    TOO_MANY_ITEMS,
    costly_items,
    pattern_facts,
)
from unbroken.spec.problems import Report, shown

from .types import JobSpec, LogRule, RuleWatch

THRESHOLD_NEEDS_OPERATOR = "a metricThreshold needs an operator"
OPERATOR_NEEDS_THRESHOLD = "an operator needs a metricThreshold"
POINTS_NEED_THRESHOLD = "metricEvaluationDataPoints needs a metricThreshold"


PROGRAMS_SIZE_MAX = 2 * PROGRAM_SIZE_MAX
"""The most instructions of RE2's programs for all patterns of a job; they compile in about 8 ms."""


def excess(rules: Sequence[LogRule]) -> str:
    """Return what the patterns of a job have too much of to be compiled; empty: nothing."""
    sources = [source for rule in rules for source in (rule.log_pattern, rule.stop_pattern or "")]
    if sum(map(len, sources)) > PATTERN_CHARACTERS_MAX:
        return f"all patterns together must have at most {PATTERN_CHARACTERS_MAX} characters"
    if sum(map(costly_items, sources)) > COSTLY_ITEMS_MAX:
        return f"all patterns together {TOO_MANY_ITEMS}"
    return ""


def affordable(rules: Sequence[LogRule], size_max: int = PROGRAMS_SIZE_MAX) -> int:
    """Return the number of rules, from the first, whose programs have size_max instructions or
    fewer together.

    The rest is not compiled.
    """
    size = 0
    for count, rule in enumerate(rules):
        for source in filter(None, (rule.log_pattern, rule.stop_pattern)):
            size += pattern_facts(source).size
            if size > size_max:
                return count
    return len(rules)


def check_log_rules(
    rules: Sequence[LogRule], path: str, report: Report, size_max: int = PROGRAMS_SIZE_MAX
) -> None:
    """Report errors that make a rule fail or never match."""
    place = f"{path}.logMonitoringConfiguration"
    if why := excess(rules):
        report.invalid(place, [], why)
        return
    count = affordable(rules, size_max)
    for index, rule in enumerate(rules[:count]):
        if not report.has(f"{place}[{index}]"):
            _check_rule(rule, f"{place}[{index}]", report)
    if count < len(rules):
        why = (
            f"with the patterns of rule {shown(rules[count].name)} the programs of all have "
            f"more than {size_max} instructions of RE2; use smaller counted repetitions"
        )
        report.invalid(f"{place}[{count}].logPattern", rules[count].log_pattern, why)


def _check_rule(rule: LogRule, place: str, report: Report) -> None:
    groups = _groups(rule.log_pattern, f"{place}.logPattern", report)
    if rule.stop_pattern is not None:
        _groups(rule.stop_pattern, f"{place}.stopPattern", report)
    _check_metric(rule, groups, place, report)
    _warn(rule, place, report)


def check_watches(
    watches: Mapping[str, RuleWatch], spec: JobSpec, path: str, report: Report
) -> None:
    """Report watches of unknown rules, or of unknown ranks."""
    rules = [rule.name for rule in spec.run_policy.log_monitoring_configuration]
    nproc = spec.nproc_per_node
    count = whole_number(nproc, 0, INT32_MAX)
    world = spec.nnodes * count if count is not None else None
    for name, watch in watches.items():
        if name not in (*rules, "*"):
            report.invalid(
                path, name, f"no log rule has this name; there are: {', '.join(rules) or 'none'}"
            )
        over = [rank for rank in watch.ranks or () if world is not None and rank >= world]
        if over:
            report.invalid(path, min(over), f"the job's ranks end at {(world or 0) - 1}")


def _groups(pattern: str, path: str, report: Report) -> int:
    """Return the number of capture groups of a pattern; report one that RE2 cannot compile."""
    facts = pattern_facts(pattern)
    if facts.problem:
        report.invalid(path, pattern, facts.problem)
        return 1
    return facts.groups


def _check_metric(rule: LogRule, groups: int, path: str, report: Report) -> None:
    has_threshold, has_operator = rule.metric_threshold is not None, rule.operator is not None
    if has_threshold and not has_operator:
        report.required(f"{path}.operator", THRESHOLD_NEEDS_OPERATOR)
    elif has_operator and not has_threshold:
        report.required(f"{path}.metricThreshold", OPERATOR_NEEDS_THRESHOLD)
    elif has_threshold and groups == 0:
        why = "a metricThreshold needs a group in parentheses that holds the number"
        report.invalid(f"{path}.logPattern", rule.log_pattern, why)
    elif not has_threshold and rule.metric_evaluation_data_points > 1:
        report.required(f"{path}.metricThreshold", POINTS_NEED_THRESHOLD)


def _warn(rule: LogRule, path: str, report: Report) -> None:
    numbers = {
        "expectedStartCutOffInSeconds": rule.expected_start_cut_off_in_seconds,
        "expectedRecurringFrequencyInSeconds": rule.expected_recurring_frequency_in_seconds,
        "metricThreshold": rule.metric_threshold,
    }
    for key, number in numbers.items():
        if number is not None and number != int(number):
            report.warn(f"{path}.{key}: the stock agent and client know whole numbers only")
    if rule.fault_on_match:
        report.warn(f"{path}.faultOnMatch: sagemaker-hyperpod 3.12 cannot list jobs that have it")
    elif all(number is None for number in numbers.values()):
        report.warn(f"{path}: finds nothing: it has no time limit, threshold or faultOnMatch")
