"""How `describe` shows the next start of a job's workers."""

from __future__ import annotations

from unbroken.cli.job.agents import agent_value, warm_lines
from unbroken.wire.agent import AgentReport, AgentState, WarmReport


def lines(*reports: WarmReport | None) -> list[str]:
    agents = [AgentReport("a", AgentState.RUNNING, warm=report) for report in reports]
    return [*warm_lines({f"pod-{n}": agent_value(agent) for n, agent in enumerate(agents)})]


def test_pods_of_one_answer_share_a_line() -> None:
    warm = WarmReport("", 2985, 12.46)
    assert lines(warm, WarmReport("the template is not ready yet"), warm) == [
        "pod-0 and 1 more: warm: 2985 modules are imported by then, which saves 12.5 s",
        "pod-1: cold: the template is not ready yet",
    ]


def test_what_each_start_imports_is_named_with_its_reason() -> None:
    reason = "torchmetrics and 17 more: LOCAL_RANK is read while it is imported"
    assert lines(WarmReport("", 3, 0.0, (reason,))) == [
        "pod-0: warm: 3 modules are imported by then",
        f"  imported at each start: {reason}",
    ]


def test_what_parked_workers_import_for_their_rank_is_counted() -> None:
    why = "which read a rank's variables or start threads"
    assert lines(WarmReport("", 3, 1.0, (), 215)) == [
        "pod-0: warm: 3 modules are imported by then, which saves 1.0 s",
        f"  imported by parked workers: 215 more modules, {why}",
    ]


def test_an_agent_without_warm_starts_has_no_line() -> None:
    assert lines(None) == []
