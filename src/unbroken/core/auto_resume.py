"""Restarts a job whose node or pod is lost: when, how often, and which pods are deleted.  Pure.

It deletes pods and nothing else. The program that runs the job (Kubeflow's operator, or that of the
local cluster) replaces them, so both can work side by side. If that program counts deleted pods as
failures, the job is suspended instead, and runs again once none of its pods is left
(`Picture.by_suspension`).

- Before it deletes a pod, it writes the uids of all pods of the job and the raised count into the
  annotations of the job.  That write, made only if the job is unchanged, is the decision.  Only
  those pods are deleted, also if messages are late, doubled or lost, or an operator takes over.
- Signs from the same pods are consequences of the fault that was decided on.  Signs from other pods
  wait `WINDOW_SECONDS` for more, so that the node is blamed and not the first of its pods.
- A pod is deleted by force only if its node is fenced or gone: else it might still be training.
- The write of a decision suspends the job, if it is to be suspended. The write that ends its
  suspension says so in the record, so a new operator knows whose suspension it is.

Each step gets all that is known of the job (`Picture`); an old picture leads to the same orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from unbroken.spec.auto_resume import Resume
from unbroken.spec.keys import HEALTH

from .losses import Loss, closed, noted
from .wording import all_of, counted

WINDOW_SECONDS = 2.0
"""Time from the first sign of a fault to the decision: all effects of one cause show by then."""
NOT_READY_SECONDS = 40.0
"""A node that reports that it is not ready may be ready again soon.  Kubernetes has already waited
for a silent node (kube-controller-manager --node-monitor-grace-period, 40 s until v1.31)."""
STUCK_SECONDS = 60.0
"""A pod that still exists so long after the end of its grace period does not end by itself
(kubeflow/trainer#2072)."""
RESEND_SECONDS = 5.0
"""An order is repeated after this time if its effect has not been seen."""
FAULT_LENGTH = 300

RESTARTING = "Restarting"
"""Reason of the event after the name of the kind, as the training operator's."""
EXHAUSTED = "AutoResumeExhausted"
AGAIN = "AutoResumeWaiting"
INVALID = "AutoResumeInvalid"
LIFTED = "AutoResumeLifted"
STALLED = "AutoResumeStalled"
STUCK = "AutoResumeStuck"
TOO_LATE = "AutoResumeTooLate"
ENDED = frozenset({"Succeeded", "Failed"})
FAILED = "Failed"
"""Type of the condition of a failed job, also a phase of a pod."""
OWN_DEADLINE = "DeadlineExceeded"
"""Reason of a pod that ended by its own `activeDeadlineSeconds`: no fault."""


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod of the job."""

    name: str
    uid: str
    node: str | None = None
    phase: str = "Pending"
    reason: str = ""
    """Why the whole pod failed, such as Evicted; empty: its program failed."""
    restarts_containers: bool = True
    """The restart policy is OnFailure or Always: a failed program does not fail the pod."""
    ends_by: float | None = None
    """Time at which the grace period of its deletion ends; None: it is not being deleted."""

    @property
    def has_ended(self) -> bool:
        """True if nothing of it runs, now or later; a finalizer may keep its object for ever."""
        return self.phase in ENDED


class Readiness(Enum):
    """The status of a node's Ready condition."""

    READY = "True"
    NOT_READY = "False"
    SILENT = "Unknown"


@dataclass(frozen=True, slots=True)
class PodNode:
    """A node that a pod of the job is on."""

    name: str
    readiness: Readiness = Readiness.READY
    not_ready_since: float = 0.0
    trouble: str = ""
    """Why the node is unhealthy, in words; empty: it is healthy."""
    is_fenced: bool = False
    """The node is proven to run nothing."""


@dataclass(frozen=True, slots=True)
class Record:
    """The job's restarts, as its annotations keep them."""

    count: int = 0
    fault: str = ""
    at: float | None = None
    pods: frozenset[str] = frozenset()
    """Uids of the pods that the latest restart deletes."""
    nodes: frozenset[str] = frozenset()
    """Nodes that were unhealthy at the latest restart.  A pod that is placed on one again is not
    moved: nothing keeps pods off the node, and each restart would end there."""
    exhausted: str = ""
    """The fault that found no retry left."""
    is_suspended: bool = False
    """The job is suspended until the pods of before the latest restart are gone."""
    losses: tuple[Loss, ...] = ()
    """The latest losses, oldest first."""
    default: int = 0
    """Restarts that the cluster allows the job, which has no annotations of its user; 0: none."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is known of a job."""

    kind: str
    name: str
    version: str
    """A record is written only to this version of the job."""
    resume: Resume
    record: Record = Record()
    problems: tuple[str, ...] = ()
    is_over: bool = False
    """The job has ended, is suspended, or is being deleted."""
    by_suspension: bool = False
    """A restart suspends the job and deletes none of its pods: the controller that makes them
    does."""
    is_suspended: bool = False
    is_leaving: bool = False
    """The job is being deleted."""
    ended_as: str = ""
    """Type of the condition that says that the job has ended; empty: it has not."""
    pods: tuple[PodState, ...] = ()
    nodes: Mapping[str, PodNode] | None = None
    """The pods' nodes by name; a pod's node that is missing here is certainly gone."""

    @property
    def title(self) -> str:
        """The job with its kind, as messages name it."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class WriteResumeRecord:
    """Write the record into the annotations if the job still has this version; if not, drop the
    orders that follow."""

    record: Record
    version: str
    suspends: bool | None = None
    """Suspend the job, or let it run again, by the same write; None: neither."""


@dataclass(frozen=True, slots=True)
class DeleteResumedPod:
    """Delete the pod of this uid.  `force`: without grace, after one more look at its node."""

    name: str
    uid: str
    node: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class AskForFence:
    """Request proof that nothing runs on the node."""

    node: str
    pod: str
    """Uid of the pod that the proof is needed for."""
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """Record an event on the job."""

    reason: str
    message: str
    is_warning: bool = True


ResumeEffect = WriteResumeRecord | DeleteResumedPod | AskForFence | Say
P = TypeVar("P", bound=Picture)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class LossSign:
    """A sign of a fault of a pod, of its node, or of a job on pods that are well."""

    pod: str
    cause: str
    is_of_node: bool
    uid: str = ""
    """Uid of the pod."""
    node: str = ""
    """Name of the node, if the fault is the node's."""
    job: str = ""
    """Id of the job, if the fault is the job's and no pod's."""

    @property
    def culprit(self) -> str:
        """The node, the pod or the job that is at fault."""
        if self.job:
            return f"job {self.job}"
        return f"node {self.node}" if self.is_of_node else f"pod {self.pod}"


class Resumption(Generic[P, E]):
    """The machine of one job, seen as `P`, with effects `E`; a subclass says which pods a restart
    deletes.  Call `step` after each change and at `deadline()`."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Time of the first sign of a fault that is not decided on yet."""
        self._deadline: float | None = None
        self._said: tuple[str, ...] = ()
        self._at: float | None = None
        """Time of the restart that the next two fields belong to."""
        self._recovered: set[str] = set()
        """Nodes that were seen healthy since that restart."""
        self._is_again_told = False
        self._is_stall_told = False
        self._asked: dict[str, float] = {}
        """Nodes whose fence is asked for: when it was asked for last."""
        self._stuck_told: set[str] = set()
        """Uids of pods that were reported to be stuck."""

    def deadline(self) -> float | None:
        """Return when to call `step` again without a change; None: only after a change."""
        return self._deadline

    def step(self, seen: P, now: float) -> list[ResumeEffect | E]:
        """Return the orders, to be carried out in this order."""
        self._deadline = None
        effects: list[ResumeEffect | E] = []
        if seen.problems != self._said:
            effects += [Say(INVALID, problem) for problem in seen.problems]
            self._said = seen.problems
        if seen.record.is_suspended:
            self._since = None
            return effects + self._hold(seen, now)
        default = seen.resume.retries_max if seen.resume.is_default else 0
        if default != seen.record.default and not seen.is_over:
            # Commands and metrics know of the default by this record alone.
            record = replace(seen.record, default=default)
            return [*effects, WriteResumeRecord(record, seen.version)]
        if seen.is_over or not seen.resume.is_wanted:
            self._since = None
            return effects + self._tell_of_failure(seen, now)
        self._note_recoveries(seen)
        condemned = [pod for pod in seen.pods if self._is_condemned(seen, pod)]
        if not seen.by_suspension:
            effects += self._remove(seen, condemned, now)
        others = [pod for pod in seen.pods if not self._is_condemned(seen, pod)]
        again = [pod for pod in others if self._is_again(seen, pod)]
        if again and not self._is_again_told:
            self._is_again_told = True
            effects.append(Say(AGAIN, _again_words(seen, again)))
        signs = [sign for pod in others for sign in self._signs(seen, pod, now)]
        signs += self._other_signs(seen, now)
        if not signs and self._runs_again(seen):
            record = replace(seen.record, losses=closed(seen.record.losses, now))
            effects.append(WriteResumeRecord(record, seen.version))
        return effects + self._judge(seen, signs, now)

    # --- what kinds of jobs differ in

    def _is_condemned(self, seen: P, pod: PodState) -> bool:
        """True if a decision was made to delete the pod."""
        return pod.uid in seen.record.pods

    def _affected(self, seen: P, signs: list[LossSign]) -> frozenset[str]:
        """Return the uids of the pods that a restart for these signs deletes."""
        raise NotImplementedError

    def _write(self, seen: P, record: Record, signs: list[LossSign]) -> ResumeEffect | E:
        """Return the order that writes the decision."""
        return WriteResumeRecord(record, seen.version, suspends=seen.by_suspension or None)

    def _is_failure(self, seen: P, pod: PodState) -> bool:
        """True if the phase of a pod is a sign of a fault."""
        is_lost = bool(pod.reason) or pod.restarts_containers
        return pod.phase == "Failed" and is_lost and pod.reason != OWN_DEADLINE

    def _other_signs(self, seen: P, now: float) -> Iterable[LossSign]:
        """List signs that no existing pod shows."""
        return ()

    def _runs_again(self, seen: P) -> bool:
        """True if the job runs again after the newest loss, and the record does not say so."""
        losses = seen.record.losses
        if not losses or not losses[-1].is_open:
            return False
        fresh = [pod for pod in seen.pods if pod.uid not in seen.record.pods]
        running = [pod for pod in fresh if pod.phase == "Running" and pod.ends_by is None]
        return len(running) >= losses[-1].pods

    def _done(self, seen: P, pods: frozenset[str], signs: list[LossSign]) -> str:
        """Say what a restart does to the pods."""
        if seen.by_suspension:
            return f"suspends it until its pods ({len(pods)}) are gone"
        return f"deletes {all_of(len(pods), 'pod')}"

    def _note_recoveries(self, seen: P) -> None:
        if self._at != seen.record.at:
            self._at = seen.record.at
            self._recovered.clear()
            self._is_again_told = False
            self._is_stall_told = False
        for name in seen.record.nodes:
            node = (seen.nodes or {}).get(name)
            if node is not None and not node.trouble:
                self._recovered.add(name)

    def _is_again(self, seen: P, pod: PodState) -> bool:
        """True if the pod is again on a node that the latest restart moved it away from, and the
        node is still unhealthy."""
        node = (seen.nodes or {}).get(pod.node or "")
        is_known = node is not None and node.name in seen.record.nodes - self._recovered
        return is_known and node is not None and bool(node.trouble) and pod.phase not in ENDED

    # --- deciding

    def _judge(self, seen: P, signs: list[LossSign], now: float) -> list[ResumeEffect | E]:
        if not signs:
            self._since = None
            return []
        if self._since is None:
            self._since = now
        if now < self._since + WINDOW_SECONDS:
            self._look_at(self._since + WINDOW_SECONDS)
            return []
        fault = _words(signs)
        record, most = seen.record, seen.resume.retries_max
        if record.count >= most:
            return self._give_up(seen, signs, now)
        self._look_at(now + RESEND_SECONDS)
        number = record.count + 1
        pods = self._affected(seen, signs)
        unhealthy = frozenset(name for name, node in (seen.nodes or {}).items() if node.trouble)
        remedy = self._done(seen, pods, signs)
        loss = self._loss(seen, signs, now, remedy)
        losses = noted(record.losses, replace(loss, restart=number))
        record = replace(
            record,
            count=number,
            fault=fault,
            at=now,
            pods=pods,
            nodes=unhealthy,
            exhausted="",
            is_suspended=seen.by_suspension,
            losses=losses,
        )
        done = f"{remedy} (restart {number} of at most {most})"
        return [
            self._write(seen, record, signs),
            Say(seen.kind + RESTARTING, f"{seen.title} is restarting because {fault}: {done}"),
        ]

    def _loss(self, seen: P, signs: list[LossSign], now: float, remedy: str) -> Loss:
        """Return the loss that the signs show, without a restart."""
        first = _first(signs)
        needed = sum(pod.phase != "Succeeded" for pod in seen.pods)
        since = now if self._since is None else self._since
        return Loss(since, now, first.culprit, _words(signs), remedy, pods=max(needed, 1))

    def _give_up(self, seen: P, signs: list[LossSign], now: float) -> list[ResumeEffect | E]:
        if seen.record.exhausted:
            return []
        self._look_at(now + RESEND_SECONDS)
        fault, done = _words(signs), counted(seen.record.count, "restart")
        remedy = f"no action: {done} of at most {seen.resume.retries_max}"
        losses = noted(seen.record.losses, self._loss(seen, signs, now, remedy))
        text = f"{fault}; {remedy}"
        return [
            WriteResumeRecord(replace(seen.record, exhausted=fault, losses=losses), seen.version),
            Say(EXHAUSTED, f"{seen.title} is not restarted: {text}"),
        ]

    def _signs(self, seen: P, pod: PodState, now: float) -> Iterator[LossSign]:
        """List the signs of a fault of a pod."""
        if not pod.has_ended and pod.node is not None:
            node = (seen.nodes or {}).get(pod.node)
            if node is not None and self._is_again(seen, pod):
                node = replace(node, trouble="")
            cause = self._node_trouble(node, now)
            if cause:
                yield LossSign(pod.name, f"node {pod.node} {cause}", True, pod.uid, pod.node)
        if pod.phase == "Unknown":
            yield LossSign(pod.name, "has an unknown phase", False, pod.uid)
        if self._is_failure(seen, pod):
            why = f" ({pod.reason})" if pod.reason else ""
            yield LossSign(pod.name, f"failed{why}", False, pod.uid)
        if pod.ends_by is not None and not pod.has_ended:
            if now >= pod.ends_by + STUCK_SECONDS:
                yield LossSign(pod.name, "is still terminating after its deletion", False, pod.uid)
            else:
                self._look_at(pod.ends_by + STUCK_SECONDS)

    def _node_trouble(self, node: PodNode | None, now: float) -> str:
        """Why pods must leave a node; empty: they may stay."""
        if node is None:
            return "is gone"
        if node.is_fenced:
            return "is out of service"
        if node.trouble:
            return f"is unhealthy ({node.trouble})"
        match node.readiness:
            case Readiness.READY:
                return ""
            case Readiness.SILENT:
                return "does not answer"
            case Readiness.NOT_READY:
                until = node.not_ready_since + NOT_READY_SECONDS
                if now >= until:
                    return "is not ready"
                self._look_at(until)
                return ""

    # --- removing

    def _remove(self, seen: P, pods: Iterable[PodState], now: float) -> list[ResumeEffect | E]:
        """Return the next order for each pod to be deleted, until it is gone."""
        effects: list[ResumeEffect | E] = []
        nodes = seen.nodes or {}
        self._asked = {name: at for name, at in self._asked.items() if name in nodes}
        for pod in pods:
            self._look_at(now + RESEND_SECONDS)
            node = nodes.get(pod.node) if pod.node is not None else None
            if pod.node is not None and (node is None or node.is_fenced):
                effects.append(DeleteResumedPod(pod.name, pod.uid, pod.node, force=True))
                continue
            is_reached = node is None or node.readiness is Readiness.READY
            if pod.ends_by is None or (pod.has_ended and not is_reached):
                effects.append(DeleteResumedPod(pod.name, pod.uid, pod.node))
            if node is None or pod.has_ended:
                continue
            if is_reached:
                effects += self._tell_of_stuck(seen, pod, now)
            elif now >= self._asked.get(node.name, -RESEND_SECONDS) + RESEND_SECONDS:
                self._asked[node.name] = now
                reason = f"pod {pod.name} of {seen.title}"
                effects.append(AskForFence(node.name, pod.uid, reason))
        return effects

    def _tell_of_stuck(self, seen: P, pod: PodState, now: float) -> list[ResumeEffect | E]:
        """Say once that a pod does not end though its node is ready: no reason for a fence."""
        is_stuck = pod.ends_by is not None and now >= pod.ends_by + STUCK_SECONDS
        if not is_stuck or pod.uid in self._stuck_told:
            return []
        self._stuck_told &= {one.uid for one in seen.pods}
        self._stuck_told.add(pod.uid)
        text = (
            f"{seen.title} cannot restart: pod {pod.name} still runs on node {pod.node}, which is "
            f"ready, {STUCK_SECONDS:.0f} s after the grace of its deletion. Find out what keeps "
            "its processes, or reboot the node"
        )
        return [Say(STUCK, text)]

    # --- holding a job suspended

    def _hold(self, seen: P, now: float) -> list[ResumeEffect | E]:
        """Keep the job suspended until none of its pods is left, then let it run again."""
        record = seen.record
        if seen.is_leaving:
            return []
        self._look_at(now + RESEND_SECONDS)
        if seen.ended_as:
            is_failed = seen.ended_as == FAILED
            ended = replace(record, is_suspended=False, exhausted=record.fault if is_failed else "")
            told = [_too_late(seen, record.fault)] if is_failed else []
            return [WriteResumeRecord(ended, seen.version), *told]
        if not seen.is_suspended:
            lifted = replace(record, is_suspended=False, pods=frozenset())
            text = (
                f"another program resumed {seen.title} before all of its pods were gone: "
                "ranks of before and after the restart may meet"
            )
            return [WriteResumeRecord(lifted, seen.version), Say(LIFTED, text)]
        left = [pod for pod in seen.pods if not pod.has_ended]
        if not left:
            kept = frozenset(pod.uid for pod in seen.pods)
            free = replace(record, is_suspended=False, pods=kept)
            return [WriteResumeRecord(free, seen.version, suspends=False)]
        effects = self._remove(seen, (pod for pod in left if pod.ends_by is not None), now)
        return effects + self._tell_of_stall(seen, left, now)

    def _tell_of_stall(self, seen: P, left: list[PodState], now: float) -> list[ResumeEffect | E]:
        """Say once that the controller of a suspended job does not delete its pods."""
        staying = sorted(pod.name for pod in left if pod.ends_by is None)
        if not staying or self._is_stall_told:
            return []
        if seen.record.at is not None and now < seen.record.at + STUCK_SECONDS:
            return []
        self._is_stall_told = True
        text = (
            f"{seen.title} is suspended for a restart, and nobody deletes "
            f"{counted(len(staying), 'pod')} of it ({', '.join(staying[:3])}): "
            f"is the controller of {seen.kind}s running?"
        )
        return [Say(STALLED, text)]

    def _tell_of_failure(self, seen: P, now: float) -> list[ResumeEffect | E]:
        """Say once that the job has failed by the loss that a restart would have answered."""
        is_ours = seen.by_suspension and seen.resume.is_wanted and not seen.record.exhausted
        if not is_ours or seen.is_leaving or seen.ended_as != FAILED:
            return []
        # A pod that failed without a reason is no loss: its Job has ended it, or its program has.
        pods = [pod for pod in seen.pods if pod.reason or pod.phase != "Failed"]
        pods = [pod for pod in pods if pod.uid not in seen.record.pods]
        signs = [sign for pod in pods for sign in self._signs(seen, pod, now)]
        self._deadline = None
        if not signs:
            return []
        fault = _words(signs)
        loss = self._loss(seen, signs, now, "no action: the job has failed")
        losses = noted(seen.record.losses, loss)
        record = replace(seen.record, exhausted=fault, losses=losses)
        return [WriteResumeRecord(record, seen.version), _too_late(seen, fault)]

    def _look_at(self, time: float) -> None:
        self._deadline = time if self._deadline is None else min(self._deadline, time)


class AutoResume(Resumption[Picture, ResumeEffect]):
    """The machine of a job whose pods all train in step: a restart deletes all of them."""

    def _affected(self, seen: Picture, signs: list[LossSign]) -> frozenset[str]:
        return frozenset(pod.uid for pod in seen.pods)


def _too_late(seen: Picture, fault: str) -> Say:
    text = (
        f"{seen.title} failed before it could be restarted ({fault}): a lost pod counts against "
        "the backoffLimit of its Job, which must be higher than the number of pods, or ignore "
        "the condition DisruptionTarget in its podFailurePolicy"
    )
    return Say(TOO_LATE, text)


def _again_words(seen: Picture, pods: list[PodState]) -> str:
    names = ", ".join(sorted(f"{pod.name} on {pod.node}" for pod in pods)[:3])
    return (
        f"{seen.title} is again on a node that it was restarted to get away from "
        f"({names}), and is not moved again: have the node tainted, or select nodes by "
        f"{HEALTH}: Schedulable"
    )


def _first(signs: list[LossSign]) -> LossSign:
    """Return the sign that names the cause: one of a node rather than of a pod."""
    return next((sign for sign in signs if sign.is_of_node), signs[0])


def _words(signs: list[LossSign]) -> str:
    """Name the cause, with the affected pods."""
    first = _first(signs)
    if not first.is_of_node:
        return f"{first.culprit} {first.cause}"[:FAULT_LENGTH]
    names = [sign.pod for sign in signs if sign.cause == first.cause]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    others = {sign.cause for sign in signs if sign.is_of_node and sign.cause != first.cause}
    also = f"; also {', '.join(sorted(others))}" if others else ""
    return f"{first.cause} (pods {shown}){also}"[:FAULT_LENGTH]
