"""Which rung of the ladder a fault enters at, and why."""

from __future__ import annotations

from collections.abc import Sequence

from unbroken.spec.incident import Incident, Remedy
from unbroken.wire.agent import IN_PROCESS_RESTART, PROCESS_RESTART

from .incidents import RESTART_REQUESTED

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


def restart_mode(incident: Incident, before: Incident | None) -> str:
    """Whether processes may live on through the restart; `before` is the incident that led to the
    attempt that broke.  What fails again without progress, or at one step, gets new processes, and
    so does who asks for a restart."""
    is_small = incident.remedy in (Remedy.IN_PROCESS, Remedy.PROCESS, Remedy.POD)
    is_asked = any(signal.fault == RESTART_REQUESTED for signal in incident.signals)
    # The step of a fault is that of the attempt that broke: it may be told only with the fault.
    is_repeated = before is not None and (
        before.progress_at is None if incident.step is None else incident.step == before.step
    )
    return IN_PROCESS_RESTART if is_small and not is_asked and not is_repeated else PROCESS_RESTART


def kept(reason: str, ranks: int, of: int) -> str:
    """The reason of a restart through which so many ranks kept their process."""
    return f"{ranks} of {of} ranks kept their process; {reason}"
