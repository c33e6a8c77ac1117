"""Validation of the rules of `logMonitoringConfiguration` (HyperPod agent 1.1.3).

The stock agent drops all rules if one is bad, and reports that in a file of its own; here each is
checked before the job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unbroken.spec.patterns import PATTERN_CHARACTERS_MAX, pattern_facts
from unbroken.spec.problems import Report

from .log_rule_ranks import Watch
from .types import JobSpec, LogRule

THRESHOLD_NEEDS_OPERATOR = "a metricThreshold needs an operator"
OPERATOR_NEEDS_THRESHOLD = "an operator needs a metricThreshold"
POINTS_NEED_THRESHOLD = "metricEvaluationDataPoints needs a metricThreshold"


def are_short(rules: Sequence[LogRule]) -> bool:
    """True if all patterns of a job together compile as fast as one may (0.25 s)."""
    lengths = (len(rule.log_pattern) + len(rule.stop_pattern or "") for rule in rules)
    return sum(lengths) <= PATTERN_CHARACTERS_MAX


def check_log_rules(rules: Sequence[LogRule], path: str, report: Report) -> None:
    """Report errors that make a rule fail or never match."""
    if not are_short(rules):
        why = f"all patterns together must have at most {PATTERN_CHARACTERS_MAX} characters"
        report.invalid(f"{path}.logMonitoringConfiguration", [], why)
        return
    for index, rule in enumerate(rules):
        place = f"{path}.logMonitoringConfiguration[{index}]"
        if report.has(place):
            continue
        groups = _groups(rule.log_pattern, f"{place}.logPattern", report)
        if rule.stop_pattern is not None:
            _groups(rule.stop_pattern, f"{place}.stopPattern", report)
        _check_metric(rule, groups, place, report)
        _warn(rule, place, report)


def check_watches(watches: Mapping[str, Watch], spec: JobSpec, path: str, report: Report) -> None:
    """Report watches of unknown rules, or of unknown ranks."""
    rules = [rule.name for rule in spec.run_policy.log_monitoring_configuration]
    nproc = spec.nproc_per_node
    is_known = nproc.isdecimal() and len(nproc) < 10
    world = spec.nnodes * int(nproc) if is_known else None
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
