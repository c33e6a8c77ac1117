"""Why a pod of the API does not run: the nearest cause first.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightkube.models.core_v1 import ContainerStateTerminated, ContainerStatus, PodStatus
from lightkube.resources.core_v1 import Pod

from unbroken.core.job.obstacles import ENDED, container_lines, printable
from unbroken.core.wording import counted
from unbroken.spec.job.launch import training_name

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
    """In the API's words; empty: no trouble."""
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
