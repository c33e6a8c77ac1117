"""Evidence from logs of a healthy job about its rules: limits too tight, patterns that miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unbroken.wire.agent import RuleView

from .replay import RuleMatches
from .rule_config import CompiledRule
from .rule_lint import LintFinding, Severity
from .rules import shown

ROOM = 2
"""Recommended limit, as a multiple of the longest time seen."""


def check_limits(
    rule: CompiledRule, path: str, heard: RuleMatches, view: RuleView, start_at: float
) -> Iterator[LintFinding]:
    """Yield findings about a rule's limits, from its replay."""
    spec = rule.spec

    def finding(severity: Severity, key: str, what: str, why: str, instead: str) -> LintFinding:
        return LintFinding(severity, spec.name, f"{path}.{key}", what, why, instead)

    limits = (
        ("expectedStartCutOffInSeconds", spec.expected_start_cut_off_in_seconds, heard.first_at),
        ("expectedRecurringFrequencyInSeconds", spec.expected_recurring_frequency_in_seconds, None),
    )
    for key, limit, first_at in limits:
        seen = heard.gap_seconds if "Recurring" in key else (first_at or start_at) - start_at
        if not limit or not seen or limit >= ROOM * seen:
            continue
        what = f"{limit:g} s, and the logs have a silence of {seen:g} s"
        severity = Severity.WARNING if limit < seen else Severity.NOTE
        why = "such a job would be restarted" if limit < seen else "there is little room"
        yield finding(severity, key, what, why, f"give at least {ROOM * seen:g}")
    if view.unreadable:
        what = f"{view.unreadable} captured texts are no numbers"
        why = "each counts as a bad value once a number was seen"
        yield finding(Severity.WARNING, "logPattern", what, why, "capture the number alone")


def check_sample(rule: CompiledRule, path: str, lines: Sequence[bytes]) -> Iterator[LintFinding]:
    """Yield findings about a rule's patterns, from lines of the logs."""
    name, matching = rule.spec.name, [line for line in lines if rule.pattern.is_match(line)]
    if not matching:
        inside = [line for line in lines if rule.pattern.is_found(line)]
        what = f"matches none of {len(lines)} lines of the logs"
        why = "its time limits would be over, its values never seen"
        instead = "see how the line really looks"
        if inside:
            why = f"{len(inside)} have it, but not at their start: {shown(inside[0])[:80]!r}"
            instead = "begin the pattern with .*"
        severity = Severity.WARNING if inside or not rule.spec.fault_on_match else Severity.NOTE
        yield LintFinding(severity, name, f"{path}.logPattern", what, why, instead)
    elif rule.stop and all(map(rule.stop.is_match, matching)):
        what = "matches whenever logPattern does"
        why = "the first match stops the rule for good"
        instead = "match what is written once at the end"
        yield LintFinding(Severity.WARNING, name, f"{path}.stopPattern", what, why, instead)
