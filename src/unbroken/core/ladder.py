"""Which rung of the ladder a fault enters at, and why."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.spec.incident import Remedy

_NAMED = 3
WELL = "every pod is well; "


def choose(budget: Remedy, budget_reason: str, lost_pods: Sequence[str]) -> tuple[Remedy, str]:
    """The remedy for a fault that cost these pods, where the budget demands `budget` at least."""
    if budget in (Remedy.JOB, Remedy.FAIL):
        return budget, budget_reason
    if not lost_pods:
        return Remedy.PROCESS, WELL + budget_reason
    return Remedy.POD, escalated(budget_reason, lost_pods)


def escalated(reason: str, lost_pods: Sequence[str]) -> str:
    """The reason of a restart once these pods are lost too."""
    named = ", ".join(lost_pods[:_NAMED])
    more = f" and {len(lost_pods) - _NAMED} more" if len(lost_pods) > _NAMED else ""
    return f"lost {named}{more}; {reason.removeprefix(WELL)}"
