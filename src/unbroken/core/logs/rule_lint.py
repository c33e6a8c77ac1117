"""Errors and surprises in log rules, found before a job runs with them.

Nothing here guesses. What cannot be decided from the pattern alone is not reported: whether one
pattern covers another, or whether a look-around can hold. `replay` finds more from logs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unbroken.errors import SpecError
from unbroken.spec.job.log_rules import check_log_rules
from unbroken.spec.job.types import LogRule
from unbroken.spec.patterns import Pattern
from unbroken.spec.problems import Report

from .pattern_trees import NEVER, Capture, Unreadable, captures, read_pattern, shortest
from .rule_config import CompiledRule, read_rules
from .rule_sets import RuleSet


class Severity(Enum):
    """The certainty that the rule does not do what is wanted."""

    ERROR = "error"
    """The rule cannot work, or the job is refused."""
    WARNING = "warning"
    """The rule works differently from what most would expect, here or under the stock agent."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing about one rule."""

    severity: Severity
    rule: str
    path: str
    what: str
    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class _RuleFinding:
    """A finding of a rule whose name and place are known."""

    severity: Severity
    key: str
    what: str
    why: str
    instead: str


NUMBERS = b"0", b"1", b"12", b"1.5", b"12.50", b"1e-05", b"5%"
PROBES = (
    *(bytes([code]) for code in range(33, 127)),
    "é".encode(),
    "█".encode(),
    b"ab cd",
    b"2025-06-17 05:51:29,300 [INFO] main: step 3 loss=0.5",
)
"""Lines that have little in common; a pattern that matches all of them matches nearly every
line."""


def check_rules(rules: RuleSet) -> list[LintFinding]:
    """Return every finding that needs only the rules, in their order."""
    lint_findings, names = [], set[str]()
    earlier: dict[str, str] = {}
    for index, entry in enumerate(rules.entries):
        path, report = f"{rules.path}[{index}]", Report()
        # Compiled alone, the entry has place number 0.
        compiled = read_rules([entry], report)
        given = entry if isinstance(entry, Mapping) else {}
        name = str(given.get("name", index))
        if compiled:
            check_log_rules([compiled[0].spec], "", report)
        place = re.compile(r"^\.?logMonitoringConfiguration\[0\]")
        for problem in report.problems:
            at = place.sub(path, problem.path)
            why = "the job is refused at apply"
            lint_findings.append(
                LintFinding(Severity.ERROR, name, at, problem.message, why, "correct it")
            )
        if report.problems:
            continue
        said = [*_check_rule(compiled[0], given), *_check_twins(compiled[0].spec, names, earlier)]
        lint_findings += [
            LintFinding(s.severity, name, path + s.key, s.what, s.why, s.instead) for s in said
        ]
    return lint_findings


def _check_twins(spec: LogRule, names: set[str], earlier: dict[str, str]) -> Iterator[_RuleFinding]:
    if spec.name in names:
        why = "the job's reason, LogHang_NAME, does not say which"
        yield _RuleFinding(
            Severity.WARNING, ".name", "another rule has this name", why, "name it apart"
        )
    names.add(spec.name)
    fields = repr([getattr(spec, name) for name in LogRule.__slots__ if name != "name"])
    if fields in earlier:
        what = f"is rule {earlier[fields]} again"
        yield _RuleFinding(Severity.WARNING, "", what, "it finds nothing more", "remove one")
    earlier.setdefault(fields, spec.name)


def _check_rule(rule: CompiledRule, given: Mapping[str, Any]) -> Iterator[_RuleFinding]:
    yield from _check_limits(rule)
    yield from _check_stock(given)
    for key, pattern in ((".logPattern", rule.pattern), (".stopPattern", rule.stop)):
        if pattern:
            yield from _check_pattern(key, pattern)
    if rule.stop:
        yield from _check_stop(rule, rule.stop)
    if rule.meter():
        yield from _check_value(rule)
    elif rule.spec.metric_threshold is None and rule.spec.metric_evaluation_data_points > 1:
        key, what = ".metricEvaluationDataPoints", "no metricThreshold is given"
        yield _RuleFinding(
            Severity.ERROR, key, what, "no value is compared", "give threshold, operator"
        )


def _check_limits(rule: CompiledRule) -> Iterator[_RuleFinding]:
    spec = rule.spec
    start, often = (
        spec.expected_start_cut_off_in_seconds,
        spec.expected_recurring_frequency_in_seconds,
    )
    if not (start or often or rule.meter() or spec.fault_on_match):
        instead = "give a time limit, a metricThreshold or faultOnMatch"
        yield _RuleFinding(
            Severity.ERROR, "", "can never fire", "nothing is expected of it", instead
        )
    if often and not start:
        what = "no expectedStartCutOffInSeconds"
        why = "until the first match nothing is expected: a job that hangs at start is not found"
        instead = "give the seconds that the first match may take, with import and compilation"
        yield _RuleFinding(Severity.NOTE, "", what, why, instead)
    if spec.stop_pattern and not (start or often):
        what = "the rule has no time limit"
        why = "stopPattern then only ends the counting of values and faults"
        yield _RuleFinding(
            Severity.NOTE, ".stopPattern", what, why, "leave it away if that is not meant"
        )
    if 0 in (start, often):
        yield _RuleFinding(
            Severity.WARNING, "", "0 seconds", "is taken as no limit", "remove or raise it"
        )


def _check_stock(given: Mapping[str, Any]) -> Iterator[_RuleFinding]:
    """Yield what HyperPod agent 1.1.3 would read differently: it takes int() of each number."""
    keys = "metricThreshold", "expectedStartCutOffInSeconds", "expectedRecurringFrequencyInSeconds"
    for key in keys:
        value = given.get(key)
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            continue
        if number.is_integer() or not math.isfinite(number):
            continue
        is_text = isinstance(value, str)
        why = "it drops all rules of the job" if is_text else f"it takes it for {int(number)}"
        what = f"{value!r} is no whole number for the stock agent"
        instead = "nothing, here; for the stock agent log and compare larger numbers"
        yield _RuleFinding(Severity.WARNING, f".{key}", what, why, instead)


def _check_pattern(key: str, pattern: Pattern) -> Iterator[_RuleFinding]:
    source = pattern.source
    try:
        is_never = shortest(read_pattern(source)) == NEVER
    except (Unreadable, RecursionError):
        is_never = False
    if is_never:
        what = "no line can match"
        why = "an anchor stands inside, or a line end or colour code, which lines have not"
        yield _RuleFinding(Severity.ERROR, key, what, why, "match the plain text of one line")
    elif all(map(pattern.is_match, PROBES)):
        why = "any output counts; under the stock agent such a rule never hangs"
        yield _RuleFinding(
            Severity.WARNING, key, "matches about every line", why, "name what it waits for"
        )
    elif re.match(r"[A-Za-z0-9_=:' ]", source):
        why = "a pattern matches from the start of a line, as re.match does"
        what = f"only lines that begin so: {source[:30]!r}"
        yield _RuleFinding(Severity.NOTE, key, what, why, "begin with .* to find it anywhere")
    yield from _check_engines(key, pattern)


def _check_engines(key: str, pattern: Pattern) -> Iterator[_RuleFinding]:
    source = pattern.source
    if re.search(r"\\[zpPQC]|\(\?[a-zA-Z]*U", source):
        why = "the stock agent drops all rules of the job for one that it cannot compile"
        what = "Python's re (the stock agent) does not know this pattern"
        yield _RuleFinding(
            Severity.WARNING, key, what, why, "write $ for \\z, classes out, no flag U"
        )
    if re.search(r"\{,\d+\}", source):
        why = "re reads it as {0,n}, RE2 as these very characters"
        yield _RuleFinding(Severity.WARNING, key, "{,n} has two meanings", why, "write {0,n}")
    if re.search(r"\[\[:\^?\w+:\]", source):
        why = "RE2 reads it as a class, Python's re (the stock agent) as its letters"
        yield _RuleFinding(
            Severity.WARNING, key, "[[:name:]] has two meanings", why, "write out the class"
        )
    if re.search(r"\\[wWbB]", source):
        why = "re takes other letters too"
        what = "\\w and \\b know ASCII only in RE2"
        yield _RuleFinding(
            Severity.NOTE, key, what, why, "use \\S or . where other letters may stand"
        )


def _check_stop(rule: CompiledRule, stop: Pattern) -> Iterator[_RuleFinding]:
    if stop.source == rule.pattern.source:
        what, why = "is the logPattern", "the first match stops the rule for good"
    elif all(map(stop.is_match, PROBES)):
        what, why = "matches about every line", "the rule is stopped before it can find anything"
    else:
        return
    instead = "match what is written once at the end"
    yield _RuleFinding(Severity.ERROR, ".stopPattern", what, why, instead)


def _check_value(rule: CompiledRule) -> Iterator[_RuleFinding]:
    key, source = ".logPattern", rule.pattern.source
    try:
        groups = captures(read_pattern(source))
    except (Unreadable, RecursionError):
        return
    by_number = {group.number: (group, optional, eaten) for group, optional, eaten in groups}
    if 1 not in by_number:
        return
    group, is_optional, is_eaten = by_number[1]
    inside = {capture.number for capture, _, _ in captures(group.item)}
    if len(by_number) - len(inside) > 1:
        what, instead = "several groups", "make the others (?:...)"
        yield _RuleFinding(Severity.NOTE, key, what, "only the first is compared", instead)
    if is_optional:
        why = "a line that matches without it has no value, and changes nothing"
        yield _RuleFinding(
            Severity.NOTE, key, "group 1 may take no part", why, "let it always be there"
        )
    if is_eaten and re.match(r"\(?(?:\?:)?(?:\\d|\[0-9)", group.source):
        why = "the .* before it is greedy and leaves it one digit: of 12.5 it captures 2.5, or 5"
        yield _RuleFinding(
            Severity.WARNING, key, "group 1 gets the last digits", why, "put =, : or \\s before"
        )
    yield from _check_numbers(rule, group)


def _check_numbers(rule: CompiledRule, group: Capture) -> Iterator[_RuleFinding]:
    key = ".logPattern"
    try:
        inside = Pattern(group.source)
    except SpecError:
        return
    if not any(map(inside.is_whole, NUMBERS)):
        if re.fullmatch(r"[A-Za-z _|]+", group.source):
            what = f"group 1 captures {group.source!r}"
            yield _RuleFinding(
                Severity.ERROR, key, what, "no number can be in it", "capture the number"
            )
        return
    if not inside.is_whole(b"nan"):
        often = rule.spec.expected_recurring_frequency_in_seconds
        what = "group 1 does not take nan"
        why = "a line with nan does not match: " + (
            "it is found as silence only" if often else "this rule never sees it"
        )
        severity = Severity.NOTE if often else Severity.WARNING
        yield _RuleFinding(severity, key, what, why, "capture (\\S+): nan then counts as bad")
    if not inside.is_whole(b"6.9E-05") and inside.is_match(b"6.9E-05"):
        why = "of 6.9E-05 it captures 6.9"
        yield _RuleFinding(Severity.NOTE, key, "group 1 takes no exponent", why, "capture (\\S+)")
