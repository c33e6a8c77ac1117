"""Kueue's Workload of a job: its effect on the job, and what to do about the Workload.

Kueue gives a job its share of the cluster by admitting the job's Workload, and takes the share back
by evicting it. A job runs only while it is admitted.

The behaviour follows Kueue's own integrations (kueue v0.16,
pkg/controller/jobframework/reconciler.go), with two differences. A job that its user suspends
leaves the queue. A Workload that somebody has deleted stops the job only once there is a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.spec.keys import ConditionType

PREEMPTED, NODE_FAILURES, ADMISSION_CHECK = "Preempted", "NodeFailures", "AdmissionCheck"
"""Reasons of an eviction (kueue v0.16, workload_types.go)."""
QUEUED, EVICTED, DEACTIVATED = "Queued", "Evicted", "Deactivated"
HOLDS = (QUEUED, EVICTED, DEACTIVATED)
"""Reasons of the job's condition Suspended."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A job may not run; reason and message are for its condition."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Domain:
    """A place for pods: labels that their node must have, and how many of them go there."""

    labels: Mapping[str, str]
    pods: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Kueue's placement for the pods of one replica spec."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    domains: tuple[Domain, ...] = ()
    """Domains for the pods, in the order of their indexes; none: any node that the selector
    allows."""

    def of_pod(self, index: int) -> Mapping[str, str]:
        """Labels that the node of the pod with this index must have."""
        for domain in self.domains:
            if index < domain.pods:
                return {**self.node_selector, **domain.labels}
            index -= domain.pods
        return self.node_selector


@dataclass(frozen=True, slots=True)
class Admission:
    """A job may run, like this."""

    workload: str
    placements: Mapping[str, Placement]
    """Placements by replica spec."""


Gate = Hold | Admission | None
"""The queue's decision; None: no queue is involved."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Make the Workload."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Delete the Workload; the reason is for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Let the Workload wait in the job's queue."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Nothing of the job runs any more: free its quota, and let it wait again if Kueue wants."""

    reason: str
    message: str
    is_requeued: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Write a condition of the Workload."""

    type: str
    is_true: bool
    reason: str
    message: str


QueueOrder = Ask | Withdraw | Move | GiveBack | Report


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """The decision whether the job may run, and at most one order to carry out."""

    gate: Gate
    order: QueueOrder | None = None


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that is to wait in a queue."""

    queue: str
    shape: str
    """Fingerprint of the job; changes with every field of the job that a Workload contains."""
    condition: ConditionType | None = None
    message: str = ""
    """Message of the job's last condition."""
    is_suspended: bool = False
    """True if its user suspended it."""
    is_deleting: bool = False
    is_empty: bool = False
    """True if it has no pods to ask for."""
    is_idle: bool = True
    """Nothing of it runs, or may be about to."""
    has_own_pods: bool = False
    """Some of its pods were made when no queue was involved."""
    are_pods_ready: bool = False
    """True if the pods that are needed to train are ready."""


@dataclass(frozen=True, slots=True)
class WorkloadCondition:
    """A condition of a Workload, as Kueue wrote it."""

    is_true: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """A Workload as the API has it."""

    name: str
    queue: str
    shape: str
    is_active: bool = True
    is_deleting: bool = False
    conditions: Mapping[str, WorkloadCondition] = field(default_factory=dict)
    has_admission: bool = False
    waits_until: bool = False
    """Kueue has set a time for the Workload to be queued again."""
    admission: Admission | str = ""
    """The admission, or the reason why it cannot be used."""

    def true_condition(self, condition: str) -> WorkloadCondition | None:
        """The condition, if it is true."""
        found = self.conditions.get(condition)
        return found if found is not None and found.is_true else None


def decide_gate(job: QueuedJob, workload: Workload | None, before: Gate) -> QueueDecision:
    """Decide whether the job may run. `before`: the last decision; None at the start."""
    if job.is_deleting:
        return QueueDecision(before)
    if job.condition in (ConditionType.COMPLETED, ConditionType.FAILED):
        return QueueDecision(None, _finished(job, workload))
    if job.is_suspended or job.is_empty:
        leave = Withdraw("the job is suspended") if workload and job.is_idle else None
        return QueueDecision(None, _once(leave, workload))
    if workload is None or workload.is_deleting:
        return _without(job, workload, before)
    if workload.shape != job.shape:
        return _left(job, workload, "the job has changed; it is queued anew")
    if workload.true_condition("Finished"):
        return _left(job, workload, f"Workload {workload.name} is finished; it is made anew")
    return _waiting(job, workload) or _admitted(job, workload, before)


def _once(order: QueueOrder | None, workload: Workload | None) -> QueueOrder | None:
    return None if workload is not None and workload.is_deleting else order


def _finished(job: QueuedJob, workload: Workload | None) -> QueueOrder | None:
    if workload is None or workload.is_deleting or workload.true_condition("Finished"):
        return None
    # kueue v0.16, workload_types.go: WorkloadFinishedReasonSucceeded and ...Failed.
    reason = "Succeeded" if job.condition is ConditionType.COMPLETED else "Failed"
    return Report("Finished", True, reason, job.message or "the job has ended")


def _without(job: QueuedJob, workload: Workload | None, before: Gate) -> QueueDecision:
    """There is no Workload yet, or no longer."""
    if job.has_own_pods:
        # The job began before Kueue was installed, or before it had a queue: it may continue.
        return QueueDecision(None)
    ask = Ask() if workload is None else None
    if isinstance(before, Admission) and not job.is_idle:
        return QueueDecision(before, ask)
    return QueueDecision(Hold(QUEUED, f"queue {job.queue}: the job has yet to be queued"), ask)


def _left(job: QueuedJob, workload: Workload, why: str) -> QueueDecision:
    """The Workload is of no use any more; a new one is made when nothing runs and it is gone."""
    order = Withdraw(why) if job.is_idle else None
    return QueueDecision(Hold(QUEUED, f"queue {job.queue}: {why}"), order)


def _waiting(job: QueuedJob, workload: Workload) -> QueueDecision | None:
    """Return the reason why the job waits; None: it is admitted."""
    evicted, reserved = workload.true_condition("Evicted"), workload.true_condition("QuotaReserved")
    if evicted is not None:
        hold = Hold(EVICTED, f"queue {job.queue}: {evicted.reason}: {evicted.message}")
        if reserved is None and not workload.has_admission:
            return QueueDecision(_queued(job, workload, hold), _move(job, workload))
        return QueueDecision(hold, _give_back(workload, evicted) if job.is_idle else None)
    if not workload.is_active or workload.true_condition("Admitted") is None:
        return QueueDecision(
            _queued(job, workload, None), None if reserved else _move(job, workload)
        )
    return None


def _queued(job: QueuedJob, workload: Workload, last: Hold | None) -> Hold:
    """Why a Workload without quota waits."""
    if not workload.is_active:
        text = (
            f"queue {job.queue}: Workload {workload.name} is deactivated; to queue it again: "
            f"kubectl patch workload {workload.name} --type=merge -p "
            '\'{"spec":{"active":true}}\''
        )
        return Hold(DEACTIVATED, f"{text} ({last.message})" if last else text)
    if last is not None:
        return last
    told = workload.conditions.get("QuotaReserved")
    if told is not None and told.is_true:
        return Hold(QUEUED, f"queue {job.queue}: has its quota, waits for admission checks")
    why = told.message if told and told.message else "waits to be admitted"
    return Hold(QUEUED, f"queue {job.queue}: {why}")


def _move(job: QueuedJob, workload: Workload) -> QueueOrder | None:
    return Move() if workload.queue != job.queue else None


def _give_back(workload: Workload, evicted: WorkloadCondition) -> GiveBack:
    # The others are queued again by Kueue itself: after a back-off, or when their queue is
    # restarted (kueue v0.16, reconciler.go, eviction; workload_controller.go).
    is_requeued = evicted.reason in (PREEMPTED, NODE_FAILURES) or (
        evicted.reason == ADMISSION_CHECK and not workload.waits_until
    )
    return GiveBack(evicted.reason, evicted.message, is_requeued)


def _admitted(job: QueuedJob, workload: Workload, before: Gate) -> QueueDecision:
    found = workload.admission
    if isinstance(found, str):
        # A job that runs is not stopped for a flavor that was deleted.
        if isinstance(before, Admission) and not job.is_idle:
            return QueueDecision(before)
        return QueueDecision(Hold(QUEUED, f"queue {job.queue}: {found}"))
    return QueueDecision(found, _readiness(job, workload))


def _readiness(job: QueuedJob, workload: Workload) -> Report | None:
    """Return the condition that Kueue's waitForPodsReady depends on (kueue v0.16, WorkloadPodsReady
    and its reasons)."""
    said = workload.conditions.get("PodsReady")
    was_ready = said is not None and (said.is_true or said.reason == "WaitForRecovery")
    if job.are_pods_ready:
        is_recovered = said is not None and said.reason in ("WaitForRecovery", "Recovered")
        reason, text = "Recovered" if is_recovered else "Started", "all pods are ready"
    else:
        reason = "WaitForRecovery" if was_ready else "WaitForStart"
        text = "not all pods are ready"
    if said is not None and (said.is_true, said.reason) == (job.are_pods_ready, reason):
        return None
    return Report("PodsReady", job.are_pods_ready, reason, text)


def with_conditions(
    conditions: Mapping[str, WorkloadCondition], order: GiveBack | Report
) -> dict[str, WorkloadCondition]:
    """The conditions of a Workload after the order, by type."""
    found = dict(conditions)
    if isinstance(order, Report):
        found[order.type] = WorkloadCondition(order.is_true, order.reason, order.message)
        return found
    found["QuotaReserved"] = WorkloadCondition(False, "Pending", order.message)
    found["Admitted"] = WorkloadCondition(False, "NoReservation", "The workload has no reservation")
    found["Requeued"] = WorkloadCondition(order.is_requeued, order.reason, order.message)
    if "PodsReady" in found:
        found["PodsReady"] = WorkloadCondition(False, "WaitForStart", "not all pods are ready")
    return found


def moved(old: Gate, new: Gate, replica_spec: str, index: int) -> bool:
    """True if Kueue has given the pod another place."""
    if not isinstance(old, Admission) or not isinstance(new, Admission):
        return False
    places = [one.placements.get(replica_spec, Placement()).of_pod(index) for one in (old, new)]
    return places[0] != places[1]
