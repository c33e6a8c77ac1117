"""Jobs, pods and nodes of the API as the job machine sees them, and why a pod does not run.  Pure.

Of several causes `trouble_of` gives the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from lightkube.models.core_v1 import (
    ContainerStateTerminated,
    ContainerStatus,
    NodeSpec,
    NodeStatus,
    PodStatus,
)
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.job.events import NodeName, NodeView, PodName, PodPhase, PodUid, PodView
from unbroken.core.job.obstacles import ENDED, container_lines, printable
from unbroken.core.wording import counted
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.operator.kinds import JobObject
from unbroken.spec import keys
from unbroken.spec.job.launch import training_name
from unbroken.spec.job.parse import Parsed, parse_job
from unbroken.spec.job.rules import port_number
from unbroken.spec.nodes.notices import ConditionFacts, NoticedNode, find_notice
from unbroken.spec.nodes.values import health_of
from unbroken.wire.agent import PORT

from .pods import mounted_secret, runs_our_agent, topology_keys

STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons for waiting that are no trouble."""
PREEMPTION = " preemption: "
"""Marks the scheduler's text about jobs of other priorities."""


OF_STATUS = frozenset({"FailedScheduling", "BackOff", "Failed", "Unhealthy"})
"""Events whose content is in the pod's status too."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not run."""

    reason: str = ""
    """The API's words; empty: no trouble."""
    message: str = ""
    lines: tuple[str, ...] = ()
    """Last output of the container that ended."""
    ends: int = 0
    """Number of times that a container which the agent depends on has ended; 0 while it runs."""


def trouble_of(pod: Pod) -> Trouble:
    """Return the trouble of a pod."""
    status = pod.status or PodStatus()
    trouble = next(
        (container for container in _of_containers(pod, status) if container.reason), Trouble()
    )
    if status.reason:
        return Trouble(status.reason, printable(status.message or trouble.message), trouble.lines)
    if trouble.reason:
        return trouble
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            said = (condition.message or "").partition(PREEMPTION)[0]
            return Trouble(condition.reason or "Unschedulable", printable(said))
    return Trouble()


def newest_warning(events: Iterable[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return reason and message of the newest event, without those that repeat the pod's status."""
    told = [event for event in events if event.get("reason") not in OF_STATUS]
    newest = max(told, key=_time, default=None)
    return None if newest is None else (str(newest.get("reason")), str(newest.get("message")))


def _time(event: Mapping[str, Any]) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((time for time in times if time), ""))


def _of_containers(pod: Pod, status: PodStatus) -> Iterator[Trouble]:
    """Return the trouble of containers. Those before the agent's must end well; those that run with
    it do not matter."""
    spec = pod.spec
    stays = {
        container.name
        for container in (spec and spec.initContainers) or ()
        if container.restartPolicy
    }
    trains = training_name([container.name for container in (spec and spec.containers) or ()])
    for container_status in status.initContainerStatuses or ():
        yield _trouble(
            container_status, is_needed=container_status.name not in stays, may_succeed=True
        )
    for container_status in status.containerStatuses or ():
        yield _trouble(
            container_status, is_needed=container_status.name == trains, may_succeed=False
        )


def _trouble(container_status: ContainerStatus, *, is_needed: bool, may_succeed: bool) -> Trouble:
    state = container_status.state
    waiting, ended = (state.waiting, state.terminated) if state else (None, None)
    last = ended or (container_status.lastState.terminated if container_status.lastState else None)
    is_done = ended is not None and not ended.exitCode and not ended.signal
    if is_done and (may_succeed or not container_status.restartCount):
        return Trouble()
    waits = (waiting.reason or "") if waiting is not None else ""
    if last is not None and (ended is not None or waits in {*STARTING, ENDED}):
        is_running = state is not None and state.running is not None
        # The kubelet counts a restart when it starts the container.
        count = container_status.restartCount + (not is_running)
        ends = count if is_needed and not is_running else 0
        reason = ended.reason or "Error" if ended is not None and count == 1 else ENDED
        return Trouble(
            reason,
            _exit_text(container_status.name, count, last),
            container_lines(last.message or ""),
            ends,
        )
    if waits in STARTING:
        return Trouble()
    said = (waiting.message or "") if waiting is not None else ""
    return Trouble(waits, printable(f"container {container_status.name}: {said}" if said else ""))


def _exit_text(name: str, count: int, last: ContainerStateTerminated) -> str:
    how = f"exit code {last.exitCode}"
    if last.reason not in (None, "", "Error", "Completed"):
        how = f"{how} ({last.reason})"
    if count == 1:
        return printable(f"container {name} ended with {how}")
    return printable(f"container {name} has ended {counted(count, 'time')}, last with {how}")


LEAVING = frozenset({"UnschedulablePendingReboot", "UnschedulablePendingReplacement"})
"""Values of the health label that require the node to be empty: at once if a fault was found there,
else after a planned move.

Plain `Unschedulable` is a check under way: it keeps new pods off by a taint and must not interrupt
what runs.
"""

FAULTS = frozenset(
    {
        *(keys.GPU_UNHEALTHY, "NvidiaErrorReboot", "NvidiaErrorTerminate"),
        *("EfaError", "InstanceUnreachable"),
    }
)
"""Conditions that are True while a node is faulty (HyperPod's health monitoring agent)."""


def pod_view(pod: Pod) -> PodView | None:
    """Return the view of a pod for the job's machine; None for a pod that this operator did not
    make."""
    metadata, status = pod.metadata, pod.status or PodStatus()
    labels = (metadata and metadata.labels) or {}
    index = whole_number(labels.get(keys.INDEX_LABEL) or "", 0, INT32_MAX)
    if metadata is None or index is None or keys.REPLICA_LABEL not in labels:
        return None
    trouble = trouble_of(pod)
    node = pod.spec.nodeName if pod.spec else None
    return PodView(
        name=PodName(metadata.name or ""),
        uid=PodUid(metadata.uid or ""),
        replica_spec=labels[keys.REPLICA_LABEL],
        index=index,
        phase=_phase(status.phase),
        node=NodeName(node) if node else None,
        address=status.podIP or None,
        is_deleting=metadata.deletionTimestamp is not None,
        has_ended=metadata.deletionTimestamp is not None and _has_ended(pod),
        has_been_ready=_has_started(status),
        reason=trouble.reason,
        message=trouble.message,
        last_lines=trouble.lines,
        ends=trouble.ends,
        agent_port=_agent_port(pod),
    )


class AgentPlace(NamedTuple):
    """The place of an agent in its pod."""

    port: int
    restarts: int
    """Restarts of the pod's containers."""
    secret: str | None
    """Name of the Secret from which the pod has its job's key; None: it has none."""
    is_ours: bool = True
    """Its command certainly runs an agent of ours, which always proves its identity."""


def agent_place(pod: Pod) -> AgentPlace:
    """Return the place of the pod's agent."""
    statuses = (pod.status and pod.status.containerStatuses) or ()
    restarts = sum(status.restartCount for status in statuses)
    return AgentPlace(_agent_port(pod), restarts, mounted_secret(pod), runs_our_agent(pod))


def _agent_port(pod: Pod) -> int:
    """Return AGENT_PORT as a template may set it, if it is a port."""
    for container in (pod.spec and pod.spec.containers) or ():
        for entry in container.env or ():
            if entry.name == "AGENT_PORT" and (port := port_number(entry.value or "")):
                return port
    return PORT


def _phase(phase: str | None) -> PodPhase:
    try:
        return PodPhase(phase or "Pending")
    except ValueError:
        return PodPhase.UNKNOWN


def _has_started(status: PodStatus) -> bool:
    containers = status.containerStatuses or ()
    return bool(containers) and all(
        container.restartCount > 0
        or (container.state and (container.state.running or container.state.terminated))
        for container in containers
    )


def _has_ended(pod: Pod) -> bool:
    """True if each container has ended.

    The kubelet starts no container again in a pod that is being deleted; it reports the end seconds
    before the pod is gone.
    """
    specs = (pod.spec and pod.spec.containers) or ()
    statuses = {
        container_status.name: container_status.state
        for container_status in (pod.status and pod.status.containerStatuses) or ()
    }
    ended = [state.terminated for spec in specs if (state := statuses.get(spec.name)) is not None]
    # Reason of the kubelet for a container that it has not found (`pkg/kubelet/kubelet_pods.go`).
    return (
        bool(specs)
        and len(ended) == len(specs)
        and all(
            terminated is not None and terminated.reason != "ContainerStatusUnknown"
            for terminated in ended
        )
    )


def node_view(node: Node) -> NodeView:
    """Return the view of a node for the job's machine."""
    metadata, spec, status = node.metadata, node.spec or NodeSpec(), node.status or NodeStatus()
    labels = (metadata and metadata.labels) or {}
    result = {condition.type: condition for condition in status.conditions or ()}
    conditions = {name: node_condition.status for name, node_condition in result.items()}
    taints = spec.taints or ()
    facts = NoticedNode(
        labels,
        (metadata and metadata.annotations) or {},
        {taint.key: taint.value or "" for taint in taints},
        {
            name: ConditionFacts(node_condition.status, _seconds(node_condition.lastTransitionTime))
            for name, node_condition in result.items()
        },
        bool(spec.unschedulable),
    )
    levels = topology_keys(labels)
    notice = find_notice(facts)
    is_ordered = notice is not None and notice.is_order
    must_leave = health_of(labels) in LEAVING and not is_ordered
    return NodeView(
        name=NodeName((metadata and metadata.name) or ""),
        is_ready=conditions.get("Ready") == "True",
        is_fenced=any(taint.key == keys.OUT_OF_SERVICE for taint in taints),
        is_healthy=not must_leave and not _any_true(conditions, FAULTS),
        topology=tuple(labels[key] if key else "" for key in levels),
        topology_keys=levels,
        notice=notice,
    )


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _any_true(conditions: dict[str, str], names: Iterable[str]) -> bool:
    return any(conditions.get(name) == "True" for name in names)


class ParsedJobs:
    """The newest parsed version of each job; `forget` must be called when a job is gone."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Parsed]] = {}
        """Resource version and parsed job by uid."""

    def of(self, job: JobObject) -> Parsed:
        """Return the job of an object of the API, parsed."""
        uid, version = _uid(job), str(job["metadata"].get("resourceVersion"))
        kept = self._kept.get(uid)
        if kept is None or kept[0] != version:
            kept = self._kept[uid] = version, parse_job(job)
        return kept[1]

    def forget(self, job: JobObject) -> None:
        """Drop a job that no longer exists."""
        self._kept.pop(_uid(job), None)

    def __len__(self) -> int:
        return len(self._kept)


def _uid(job: JobObject) -> str:
    return str(job["metadata"].get("uid"))
