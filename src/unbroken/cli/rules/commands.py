"""`unbroken rules`: a workbench for log rules, without a cluster.

`test` replays recorded logs, `check` reads the rules alone.  Exit status 0: nothing found, 1: rules
fired or have problems, 2: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from unbroken.cli.app import App
from unbroken.cli.documents import read_documents
from unbroken.cli.options import Form, Output
from unbroken.cli.show import note, print_table
from unbroken.core.logs.recorded import LinePlace
from unbroken.core.logs.replay import Found, RuleMatches
from unbroken.core.logs.rule_config import CompiledRule
from unbroken.core.logs.rule_events import RuleViolated
from unbroken.core.logs.rule_lint import LintFinding, Severity
from unbroken.core.logs.rule_sets import RuleSet, only_set, rule_sets
from unbroken.core.logs.rules import shown
from unbroken.core.wording import counted
from unbroken.errors import SpecError, UnbrokenError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.times import time_text
from unbroken.wire.agent import RuleView

from .replay import LineSample, ReplayedAttempt, cost_ns

Object = dict[str, Any]
SHOWN_CHARACTERS = 100


def attempt_view(attempt: ReplayedAttempt) -> Object:
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


def pattern_views(rules: Sequence[CompiledRule], sample: LineSample) -> list[Object]:
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
        f"{start}, ranks {_ranks_text(attempt['ranks'])}"
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


def _ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as `0-7, 9`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


FOUND, WRONG = 1, 3
"""Exit codes; a wrong command line has 2, as with every command."""
app = App(
    no_args_is_help=True,
    help="Test and check log rules before a job uses them."
    "\n\nExample: `unbroken rules test job.yaml logs/`",
)

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB.YAML",
        help="File with a job, a fragment with runPolicy, or a list of rules.",
        show_default=False,
    ),
]
Logs = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG...",
        help="Files or folders of logs, also .gz; - is standard input.",
        show_default=False,
    ),
]
MaybeLogs = Annotated[
    list[str] | None,
    typer.Argument(metavar="LOG...", help="Also check the rules against these logs."),
]
Ranks = Annotated[
    list[str] | None,
    typer.Option(
        "--rank",
        metavar="FILE=RANK",
        help="Rank that wrote a log whose name does not show it. Repeatable.",
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node", min=1, help="Number of ranks on a node.", show_default="the job's"
    ),
]
TimeFormat = Annotated[
    str,
    typer.Option(
        help="Format of times in the lines: auto, iso, syslog, glog, epoch, or a strptime format."
    ),
]


@app.command("test")
def replay(
    job: Job,
    logs: Logs,
    rank: Ranks = None,
    nproc: Nproc = None,
    time_format: TimeFormat = "auto",
    pace: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            metavar="N",
            help="Lines per second, in place of times in the lines.",
        ),
    ] = None,
    seconds_per_line: Annotated[
        float | None, typer.Option(min=1e-6, help="Seconds between lines (the inverse of --pace).")
    ] = None,
    lead_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that the workers ran before the first line.")
    ] = 0.0,
    tail_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that the workers ran after the last line.")
    ] = 0.0,
    output: Form = Output.TEXT,
) -> None:
    """Replay recorded logs through a job's rules: show which rules fire, when and on which rank.

    Exit status 0: no rule fired. 1: a rule fired. 3: an error, so no result.

    Example: `unbroken rules test job.yaml logs/`
    """

    def act() -> bool:
        from .replay import ReplayOptions, replay_logs

        if pace and seconds_per_line:
            raise SpecError("--pace and --seconds-per-line exclude each other")
        slow = 1 / pace if pace else seconds_per_line
        options = ReplayOptions(_ranks(rank), nproc, time_format, slow, lead_seconds, tail_seconds)
        rule_set = only_set(read(job), job)
        rules = rule_set.compiled()
        if not rules:
            raise SpecError(f"{job} has no log rules")
        attempts, sample = replay_logs(rules, rule_set, logs, options)
        views = [attempt_view(attempt) for attempt in attempts]
        view = {"attempts": views, "patterns": pattern_views(rules, sample)}
        if output.is_data:
            output.print(view)
        else:
            print_test(view, is_paced=slow is not None)
        return any(item["fired"] for item in views)

    _end(act)


@app.command("check")
def check(
    job: Job,
    logs: MaybeLogs = None,
    rank: Ranks = None,
    nproc: Nproc = None,
    time_format: TimeFormat = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")
    ] = False,
    output: Form = Output.TEXT,
) -> None:
    """Check log rules for mistakes; with logs of a healthy job, also for too tight limits.

    Exit status 0: no problem. 1: the rules have an error. 3: the check
    failed, so no result.

    Example: `unbroken rules check job.yaml healthy.log --strict`
    """

    def act() -> bool:
        from unbroken.core.logs.rule_lint import Severity, check_rules

        from .replay import ReplayOptions, check_logs

        sets = read(job)
        if not sets:
            raise SpecError(f"{job} has no log rules")
        lint_findings = [rule for rule_set in sets for rule in check_rules(rule_set)]
        if logs:
            options = ReplayOptions(_ranks(rank), nproc, time_format)
            lint_findings += check_logs(only_set(sets, job), logs, options)
        if output.is_data:
            output.print({"findings": list(map(finding_view, lint_findings))})
        else:
            print_findings(lint_findings)
        wrong = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
        return any(lint_finding.severity in wrong for lint_finding in lint_findings)

    _end(act)


def read(path: str) -> list[RuleSet]:
    """Read the rules from a file of YAML or JSON.  Raises SpecError."""
    return rule_sets(read_documents(path))


def _ranks(given: list[str] | None) -> dict[str, int]:
    ranks = {}
    for text in given or ():
        file, _, number = text.rpartition("=")
        rank = whole_number(number, 0, INT32_MAX)
        if not file or rank is None:
            raise SpecError(f"--rank {text}: must be FILE=RANK")
        ranks[file] = rank
    return ranks


def _end(act: Callable[[], bool]) -> None:
    """Exit with 1 if `act` returns True, else 0; an error is printed and exits with 3."""
    try:
        is_found = act()
    except UnbrokenError as error:
        note(f"error: {error}")
        raise typer.Exit(WRONG) from error
    if is_found:
        raise typer.Exit(FOUND)
