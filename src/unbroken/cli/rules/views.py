"""Values and texts that `unbroken rules` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.cli.show import print_table
from unbroken.core.logs.recorded import LinePlace
from unbroken.core.logs.replay import Found, RuleMatches
from unbroken.core.logs.rule_config import CompiledRule
from unbroken.core.logs.rule_events import RuleViolated
from unbroken.core.logs.rule_lint import LintFinding, Severity
from unbroken.core.logs.rules import shown
from unbroken.core.wording import counted
from unbroken.spec.times import time_text
from unbroken.wire.agent import RuleView

from .replay import Attempt, Sample, cost_ns

Object = dict[str, Any]
SHOWN_CHARACTERS = 100


def attempt_view(attempt: Attempt) -> Object:
    """Findings and states of the rules of an attempt."""
    start, replay = attempt.start_at, attempt.replay
    rules = [_rule(heard, view, start) for heard, view in replay.views()]
    fired = [_fired(result, start) for result in replay.found]
    later = [_violation(rule_violated, start) for rule_violated in replay.would_follow()]
    return {
        "attempt": attempt.number,
        "lines": replay.lines,
        "ranks": attempt.ranks,
        "startAt": start,
        "seconds": round(attempt.end_at - start, 3),
        "fired": fired,
        "rules": rules,
        "ifSilentFromHere": later,
    }


def _violation(rule_violated: RuleViolated, start: float) -> Object:
    return {
        "rule": rule_violated.rule,
        "reason": rule_violated.reason,
        "at": rule_violated.at,
        "afterSeconds": round(rule_violated.at - start, 3),
        "rank": rule_violated.rank,
        "why": rule_violated.why,
    }


def _fired(found: Found, start: float) -> Object:
    what, line = found.violation, found.newest
    more: Object = {"stream": None, "line": "", "place": None}
    if line:
        more = {"stream": line.stream, "line": shown(line.text), "place": _place(line.place)}
    return {**_violation(what, start), **more, "overAt": found.over_at}


def _rule(heard: RuleMatches, view: RuleView, start: float) -> Object:
    return {
        "rule": heard.name,
        "node": heard.node,
        "ranks": view.ranks,
        "state": view.state.value,
        "matches": view.matches,
        "firstMatchAfterSeconds": _since(heard.first_at, start),
        "lastMatchAfterSeconds": _since(heard.last_at, start),
        "lastPlace": _place(heard.place),
        "lastRank": view.last_rank,
        "lastValue": view.last_value,
        "badPoints": view.bad_points,
        "unreadable": view.unreadable,
        "longestGapSeconds": round(heard.gap_seconds, 3),
        "longestGapBefore": _place(heard.gap_place),
    }


def _since(at: float | None, start: float) -> float | None:
    return None if at is None else round(at - start, 3)


def _place(place: LinePlace | None) -> str | None:
    return f"{place.file}:{place.number}" if place else None


def pattern_views(rules: Sequence[CompiledRule], sample: Sample) -> list[Object]:
    """The cost of each pattern on the sample."""
    views = []
    for rule in rules:
        for key, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop)):
            if pattern:
                cost = round(cost_ns(pattern, sample.lines))
                views.append(
                    {
                        "rule": rule.spec.name,
                        "pattern": key,
                        "engine": "RE2",
                        "nanosecondsPerLine": cost,
                        "linesPerSecond": round(1e9 / max(cost, 1)),
                    }
                )
    return views


def finding_view(lint_finding: LintFinding) -> Object:
    """A finding of `rules check` as JSON."""
    return {
        "severity": lint_finding.severity.value,
        "rule": lint_finding.rule,
        "path": lint_finding.path,
        "what": lint_finding.what,
        "why": lint_finding.why,
        "instead": lint_finding.instead,
    }


def print_findings(findings: Sequence[LintFinding]) -> None:
    """Print the answer of `rules check` as text."""
    for finding in findings:
        print(f"{finding.severity.value}: rule {finding.rule}: {finding.what}")
        print(f"  {finding.path}")
        print(f"  {finding.why}; {finding.instead}")
    counts = [(s.value, sum(finding.severity is s for finding in findings)) for s in Severity]
    print(", ".join(counted(count, word) for word, count in counts))


def print_test(view: Object, *, is_paced: bool) -> None:
    """Print the answer of `rules test` as text."""
    for attempt in view["attempts"]:
        _print_attempt(attempt, is_paced)
    print()
    titles = ("PATTERN OF", "WHICH", "ENGINE", "NS/LINE", "LINES/S ALONE")
    keys = ("rule", "pattern", "engine", "nanosecondsPerLine", "linesPerSecond")
    print_table(titles, [[item[key] for key in keys] for item in view["patterns"]])


def _print_attempt(attempt: Object, is_paced: bool) -> None:
    start = "" if is_paced else f" from {_time(attempt['startAt'])}"
    print(
        f"attempt {attempt['attempt']}: {attempt['lines']:,} lines in {attempt['seconds']:g} s"
        f"{start}, ranks {_ranks(attempt['ranks'])}"
    )
    for item in attempt["fired"]:
        _print_fired(item, is_paced)
    if not attempt["fired"]:
        print("  nothing fired")
    for item in attempt["ifSilentFromHere"]:
        print(f"  would fire if no rank logs again: {item['reason']} {_when(item, is_paced)}")
    print()
    rows = [_row(item) for item in attempt["rules"]]
    titles = ("RULE", "RANKS", "STATE", "MATCHES", "LAST VALUE", "UNREADABLE", "LONGEST GAP")
    print_table((*titles, "LAST MATCH"), rows)


def _print_fired(one: Object, is_paced: bool) -> None:
    rank = "" if one["rank"] is None else f" rank {one['rank']}"
    print(f"  {one['reason']} {_when(one, is_paced)}{rank}: {one['why']}")
    if one["place"]:
        stream = f" ({one['stream']})" if one["stream"] else ""
        print(f"    {one['place']}{stream}: {one['line'][:SHOWN_CHARACTERS]}")
    if one["overAt"] is not None:
        seconds = one["overAt"] - one["at"]
        print(f"    the log continues {seconds:g} s later; a job is restarted all the same")


def _row(one: Object) -> list[object]:
    name = one["rule"] if one["node"] is None else f"{one['rule']} (node {one['node']})"
    gap = f"{one['longestGapSeconds']:g} s" if one["matches"] > 1 else "-"
    row = [name, one["ranks"], one["state"], one["matches"], one["lastValue"] or "-"]
    return [*row, one["unreadable"], gap, one["lastPlace"] or "-"]


def _when(one: Object, is_paced: bool) -> str:
    after = f"after {one['afterSeconds']:g} s"
    return after if is_paced else f"at {_time(one['at'])} ({after})"


def _time(at: float) -> str:
    return time_text(at, has_microseconds=True)[:-4].replace("T", " ")


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks as `0-7, 9`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
