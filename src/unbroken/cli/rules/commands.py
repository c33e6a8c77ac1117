"""`unbroken rules`: a workbench for log rules, without a cluster.

`test` replays recorded logs, `check` reads the rules alone.  Exit status 0: nothing found, 1: rules
fired or have problems, 2: an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from unbroken.cli.app import App
from unbroken.cli.documents import read_documents
from unbroken.cli.options import Form, Output
from unbroken.cli.show import note
from unbroken.core.logs.rule_sets import RuleSet, only_set, rule_sets
from unbroken.errors import SpecError, UnbrokenError
from unbroken.foreign_numbers import INT32_MAX, whole_number

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
        from .replay import Options, replay_logs
        from .views import attempt_view, pattern_views, print_test

        if pace and seconds_per_line:
            raise SpecError("--pace and --seconds-per-line exclude each other")
        slow = 1 / pace if pace else seconds_per_line
        options = Options(_ranks(rank), nproc, time_format, slow, lead_seconds, tail_seconds)
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

        from .replay import Options, check_logs
        from .views import finding_view, print_findings

        sets = read(job)
        if not sets:
            raise SpecError(f"{job} has no log rules")
        lint_findings = [rule for rule_set in sets for rule in check_rules(rule_set)]
        if logs:
            options = Options(_ranks(rank), nproc, time_format)
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
