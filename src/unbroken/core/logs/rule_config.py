"""Conversion of users' log rules to what the evaluator runs: patterns, watched ranks.

A rule that cannot be used is a problem of its own and does not affect the others. In a start
command the rule's key `ranks` names the ranks that must log. Without it any rank of each node
suffices, as with the HyperPod agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unbroken.errors import SpecError
from unbroken.spec.job.log_rules import affordable, excess
from unbroken.spec.job.types import OF_NODE, RANKS_KEY, JobSpec, LogRule, RuleWatch, read_watch
from unbroken.spec.patterns import Pattern, pattern_facts
from unbroken.spec.problems import Report, below
from unbroken.spec.schema.fields import read_record

from .values import Meter

MATCHES_ALL = "matches every line, even an empty one"


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule that can be run."""

    spec: LogRule
    pattern: Pattern
    stop: Pattern | None = None
    watch: RuleWatch = OF_NODE

    def meter(self) -> Meter | None:
        """Return a meter for the values that it captures; None: they are not compared."""
        spec = self.spec
        if spec.metric_threshold is None or spec.operator is None or not self.pattern.groups:
            return None
        return Meter(spec.operator, spec.metric_threshold, spec.metric_evaluation_data_points)


def read_rules(entries: Sequence[object], report: Report) -> tuple[CompiledRule, ...]:
    """Return the usable rules of a start command, with the CRD's keys and perhaps `ranks`."""
    rules = []
    for index, entry in enumerate(entries):
        path = f"logMonitoringConfiguration[{index}]"
        fields = dict(entry) if isinstance(entry, Mapping) else entry
        ranks = fields.pop(RANKS_KEY, None) if isinstance(fields, dict) else None
        problems_before = len(report.problems)
        spec = read_record(LogRule, fields, path, report)
        try:
            watch = OF_NODE if ranks is None else read_watch(str(ranks))
        except SpecError as error:
            report.invalid(below(path, RANKS_KEY), ranks, str(error))
            continue
        rule = compile_rule(spec, path, report)
        if rule and len(report.problems) == problems_before:
            rules.append(replace(rule, watch=watch))
    return tuple(rules)


def rule_warnings(spec: JobSpec) -> list[str]:
    """Return warnings about a job's patterns for its admission; `spec` reports errors."""
    report, rules = Report(), spec.run_policy.log_monitoring_configuration
    if excess(rules):
        return []
    for index, rule in enumerate(rules[: affordable(rules)]):
        place = f"spec.runPolicy.logMonitoringConfiguration[{index}]"
        for key, source in (("logPattern", rule.log_pattern), ("stopPattern", rule.stop_pattern)):
            if source and pattern_facts(source).matches_empty:
                report.warn(f"{place}.{key}: {MATCHES_ALL}")
    return report.warnings


def compile_rule(spec: LogRule, path: str, report: Report) -> CompiledRule | None:
    """Return the rule compiled; None: it cannot be, and `report` has the problem."""
    pattern = _compile(spec.log_pattern, below(path, "logPattern"), report)
    stop = spec.stop_pattern and _compile(spec.stop_pattern, below(path, "stopPattern"), report)
    if pattern is None or (spec.stop_pattern and not stop):
        return None
    rule = CompiledRule(spec, pattern, stop or None)
    _warn(rule, path, report)
    return rule


def _compile(source: str, path: str, report: Report) -> Pattern | None:
    try:
        return Pattern(source)
    except SpecError as error:
        report.invalid(path, source, str(error))
        return None


def _warn(rule: CompiledRule, path: str, report: Report) -> None:
    """Warn about settings that are accepted and have no effect, or an unexpected one."""
    spec = rule.spec
    times = (spec.expected_start_cut_off_in_seconds, spec.expected_recurring_frequency_in_seconds)
    wants_value = spec.metric_threshold is not None or spec.operator is not None
    if wants_value and not rule.meter():
        report.warn(
            f"{path}: values are compared only with metricThreshold, operator "
            "and a capture group in logPattern"
        )
    if 0 in times:
        report.warn(f"{path}: 0 seconds is taken as no limit")
    if not (any(times) or rule.meter() or spec.fault_on_match):
        report.warn(f"{path}: this rule can never find a fault")
    if rule.pattern.is_match(b""):
        report.warn(f"{path}.logPattern: {MATCHES_ALL}")
