"""The ladder: the remedies for a fault, and the rung at which a fault enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unbroken.spec.job.incident import Incident, Remedy
from unbroken.wire.agent import IN_PROCESS_RESTART, PROCESS_RESTART

from .incidents import RESTART_REQUESTED


class Pods(Enum):
    """The pods that a remedy replaces."""

    NONE = "none"
    LOST = "lost"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Rung:
    """One remedy: what it replaces, what it keeps, and the words for it."""

    remedy: Remedy
    replaces: Pods
    keeps_processes: bool
    """True if workers that can leave their training keep their process."""
    starts_again: bool
    """True if another attempt follows."""
    code: str
    """HyperPod's code in the job's status: process-level or job-level restart."""
    plan: str
    """The plan of the remedy, in words for people."""
    done: str
    """The remedy in the past tense, in words for people."""
    plan_kept: str = ""
    """The plan if processes were kept; empty: the same plan."""
    when_pod_lost: Remedy | None = None
    """The rung if a pod is lost as well; None: this one."""
    when_kept: Remedy | None = None
    """The rung if processes were kept; None: this one."""


RUNGS = (
    Rung(
        Remedy.IN_PROCESS,
        replaces=Pods.NONE,
        keeps_processes=True,
        starts_again=True,
        code="PLR",
        plan="resume in the same processes",
        done="resumed in the same processes",
    ),
    Rung(
        Remedy.PROCESS,
        replaces=Pods.NONE,
        keeps_processes=True,
        starts_again=True,
        code="PLR",
        plan="restart the processes in their pods",
        done="restarted the processes",
        when_pod_lost=Remedy.POD,
        when_kept=Remedy.IN_PROCESS,
    ),
    Rung(
        Remedy.POD,
        replaces=Pods.LOST,
        keeps_processes=True,
        starts_again=True,
        code="PLR",
        plan="replace the pod, restart the other processes",
        done="replaced the pod",
        plan_kept="replace the pod, resume in the other processes",
    ),
    Rung(
        Remedy.JOB,
        replaces=Pods.ALL,
        keeps_processes=False,
        starts_again=True,
        code="JLR",
        plan="recreate all pods",
        done="recreated all pods",
    ),
    Rung(
        Remedy.FAIL,
        replaces=Pods.NONE,
        keeps_processes=False,
        starts_again=False,
        code="PLR",
        plan="give up",
        done="gave up",
    ),
)
"""All rungs, the lowest first."""
_BY_REMEDY = {rung.remedy: rung for rung in RUNGS}
_NAMED = 3
WELL = "all pods are healthy; "


def rung_of(remedy: Remedy) -> Rung:
    """Return the rung of the ladder that a remedy is."""
    return _BY_REMEDY[remedy]


def choose(budget: Remedy, budget_reason: str, lost_pods: Sequence[str]) -> tuple[Remedy, str]:
    """Return the remedy for a fault that cost these pods; the budget demands at least `budget`."""
    if not rung_of(budget).keeps_processes:
        return budget, budget_reason
    if not lost_pods:
        return budget, WELL + budget_reason
    return rung_of(budget).when_pod_lost or budget, escalated(budget_reason, lost_pods)


def escalated(reason: str, lost_pods: Sequence[str]) -> str:
    """Return the reason of a restart once these pods are lost too."""
    named = ", ".join(lost_pods[:_NAMED])
    more = f" and {len(lost_pods) - _NAMED} more" if len(lost_pods) > _NAMED else ""
    return f"lost {named}{more}; {reason.removeprefix(WELL)}"


def restart_mode(incident: Incident, before: Incident | None) -> str:
    """Return the restart mode: whether processes may be kept through the restart.

    `before` is the incident that led to the attempt that broke. A second failure without progress,
    a failure at the same step, or a requested restart always gets new processes.
    """
    may_keep = rung_of(incident.remedy).keeps_processes
    is_asked = any(signal.fault == RESTART_REQUESTED for signal in incident.signals)
    # The step of a fault belongs to the attempt that broke: it may be reported only with the fault.
    is_repeated = before is not None and (
        (before.progress_at or before.first_output_at) is None
        if incident.step is None
        else incident.step == before.step
    )
    return IN_PROCESS_RESTART if may_keep and not is_asked and not is_repeated else PROCESS_RESTART


def kept(reason: str, ranks: int, of: int) -> str:
    """Return the reason of a restart in which this many ranks kept their process."""
    return f"{ranks} of {of} ranks kept their process; {reason}"
