"""Which rung of the ladder a fault enters at, and why."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.spec.incident import Remedy

_NAMED = 3


def choose(budget: Remedy, budget_reason: str, lost_pods: Sequence[str]) -> tuple[Remedy, str]:
    """The remedy for a fault that cost these pods, where the budget demands `budget` at least."""
    if budget in (Remedy.JOB, Remedy.FAIL):
        return budget, budget_reason
    if not lost_pods:
        return Remedy.PROCESS, f"every pod is well; {budget_reason}"
    named = ", ".join(lost_pods[:_NAMED])
    more = f" and {len(lost_pods) - _NAMED} more" if len(lost_pods) > _NAMED else ""
    return Remedy.POD, f"lost {named}{more}; {budget_reason}"
