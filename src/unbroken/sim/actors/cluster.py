"""Nodes and pods: API objects, scheduler, kubelets, node lifecycle, fencing and repair.

They are level-triggered, as the real ones: a kubelet that can reach the API compares wanted and
running pods. A node without power runs nothing. One without network continues to run, and cannot be
asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from unbroken.core.job.events import (
    CreatePod,
    NodeName,
    NodeView,
    PodName,
    PodPhase,
    PodUid,
    PodView,
)
from unbroken.sim.schedule import Schedule
from unbroken.wire.agent import AgentReport

from .api import Table
from .links import Way

ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)


class Process(Protocol):
    """The program in a container; with it die its workers."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL: nothing of it lives when this returns."""

    def report(self) -> AgentReport:
        """Return the agent's state."""


Launch = Callable[["Local"], Process]


@dataclass(eq=False, slots=True)
class Local:
    """A pod as its kubelet knows it."""

    name: PodName
    uid: PodUid
    node: Node
    address: str
    phase: PodPhase = PodPhase.PENDING
    process: Process | None = None
    has_been_ready: bool = False
    is_ending: bool = False
    is_starting: bool = False
    restarts: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """A machine."""

    name: NodeName
    topology: tuple[str, ...] = ()
    has_power: bool = True
    island: str = ""
    """Nodes that are cut off receive messages of the same island only; empty: it is not cut off."""
    way: Way = Way.BOTH
    """Direction in which messages pass between operators and its agents, on top of other faults."""
    is_deaf: bool = False
    """True if it receives nothing from other nodes, which may receive its messages."""
    is_unreached: bool = False
    """No packet passes between it and other nodes; operators reach it."""
    paused_at: float | None = None
    """Time since when it is paused as a whole, with all its processes; None: it runs."""
    excused_until: float = 0.0
    """Time until which its workers may live at the same time as a later attempt: it is paused, or
    woke a moment ago."""
    is_waking: bool = False
    down_at: float | None = None
    is_fence_asked: bool = False
    is_repaired_at: float | None = None
    locals: dict[PodUid, Local] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """It runs its pods and can be reached."""
        return self.has_power and not self.island and not self.is_paused

    @property
    def is_paused(self) -> bool:
        """True if it is paused as a whole."""
        return self.paused_at is not None

    def receives(self, other: Node) -> bool:
        """Return whether messages of agents on another node arrive here."""
        if not (self.has_power and other.has_power) or self.is_paused or other.is_paused:
            return False
        if self is other:
            return True
        is_cut = self.is_deaf or self.is_unreached or other.is_unreached
        return self.island == other.island and not is_cut


@dataclass(frozen=True, slots=True)
class Manners:
    """Behaviour of a cluster; all in seconds."""

    slots: int = 1
    start: float = 1.0
    grace: float = 3.0
    not_ready_after: float = 8.0
    evict_after: float | None = None
    """None: pods of a lost node are never marked for deletion by the cluster."""
    fence_after: float | None = None
    """None: the fence is not answered before the world is healed."""
    fence_deletes_node: bool = False
    collects_fenced: bool = True
    """Terminating pods of a fenced node are removed by the cluster itself."""
    restarts_containers: bool = True
    removal: float = 0.0
    """Seconds from the end of a deleted pod's containers to the end of its object."""


class Cluster:
    """Everything between the operator's API calls and the programs in the containers."""

    def __init__(self, schedule: Schedule, manners: Manners, nodes: int, launch: Launch) -> None:
        self._schedule = schedule
        self.manners = manners
        self._launch = launch
        self.pods_made = 0
        self.pods: Table[PodView] = Table()
        self.nodes: Table[NodeView] = Table()
        self.machines: dict[NodeName, Node] = {}
        self.avoided: dict[PodUid, frozenset[NodeName]] = {}
        self.is_away = False
        self.answers_since = 0.0
        self.evicting: Callable[[Node], None] = lambda node: None
        """Called when the pods of a lost node are marked for deletion."""
        for number in range(nodes):
            node = Node(NodeName(f"node-{number}"), (f"spine-{number % 2}",))
            self.machines[node.name] = node
            self.nodes.put(node.name, NodeView(node.name, is_ready=True, topology=node.topology))

    # The API, as the operator and users call it.

    def create_pod(self, order: CreatePod) -> str:
        """Why not, or an empty text."""
        if order.name in self.pods.objects:
            return "AlreadyExists"
        self.pods_made += 1
        uid = PodUid(f"uid-{self.pods_made}")
        self.avoided[uid] = frozenset(order.avoid)
        self.pods.put(
            order.name,
            PodView(order.name, uid, order.replica_spec, order.index, PodPhase.PENDING),
        )
        self._schedule.after(0.05, self._bind, order.name, uid)
        return ""

    def delete_pod(self, name: PodName, uid: PodUid, *, force: bool) -> None:
        """With grace; forced, the object goes at once, and the kubelet follows when it can."""
        pod = self.pods.objects.get(name)
        if pod is None or pod.uid != uid:
            return
        if force or pod.node is None:
            self.pods.remove(name)
        elif not pod.is_deleting:
            self.pods.put(name, replace(pod, is_deleting=True))
        if pod.node is not None:
            self._wake(pod.node)

    def fence(self, name: NodeName) -> None:
        """Ask for the fence; the answer comes late, or after the repair of the world."""
        node = self.machines.get(name)
        if node is None or self.nodes.objects.get(name) is None:
            return
        node.is_fence_asked = True
        if self.manners.fence_after is not None and not self.nodes.objects[name].is_fenced:
            self._schedule.after(self.manners.fence_after, self._fenced, node)

    # Faults of machines.

    def power_off(self, node: Node) -> None:
        """Everything on it ends at once."""
        node.has_power = False
        for local in list(node.locals.values()):
            if local.process is not None:
                local.process.kill()
        self._miss(node)

    def cut_off(self, node: Node, island: str = "") -> None:
        """Its pods run on, but neither API nor operator can reach it, nor nodes of other islands;
        empty: it is alone."""
        node.island = island or node.name
        self._miss(node)

    def pause(self, node: Node) -> None:
        """Pause the node."""
        node.paused_at, node.excused_until = self._schedule.now, math.inf
        self._miss(node)

    def repair(self, node: Node) -> None:
        """Restore power and network; pods from before that are still wanted start again."""
        node.has_power, node.island = True, ""
        node.down_at, node.is_fence_asked = None, False
        node.is_repaired_at = self._schedule.now
        self._schedule.after(1.0, self._back, node)

    def go_away(self) -> None:
        """Stop answering: the API server is away."""
        self.is_away = True

    def come_back(self) -> None:
        """Answer again; all watchers look again."""
        self.is_away = False
        self.answers_since = self._schedule.now
        for name in self.machines:
            self._wake(name)

    def local(self, uid: PodUid) -> Local | None:
        """The pod where it really is."""
        for node in self.machines.values():
            if uid in node.locals:
                return node.locals[uid]
        return None

    def processes(self) -> list[Process]:
        """Return the processes that run in pods which the API has."""
        uids = {pod.uid for pod in self.pods.objects.values()}
        return [one.process for one in self._places() if one.process and one.uid in uids]

    def has_rival(self, pod: PodUid, report: AgentReport) -> bool:
        """Return whether another agent reports the rank, and an attempt as new: one that was let go
        has heard of the stop."""
        others = [one.process.report() for one in self._places() if one.process and one.uid != pod]
        newest = -1 if report.newest_attempt is None else report.newest_attempt
        return any(
            other.rank == report.rank and (other.newest_attempt or 0) >= newest for other in others
        )

    def _places(self) -> Iterator[Local]:
        return (place for node in self.machines.values() for place in node.locals.values())

    # Scheduler.

    def _bind(self, name: PodName, uid: PodUid) -> None:
        pod = self.pods.objects.get(name)
        if pod is None or pod.uid != uid or pod.node is not None:
            return
        node = None if self.is_away else self._place(uid)
        if node is None:
            self._schedule.after(3.0, self._bind, name, uid)
        else:
            self.pods.put(name, replace(pod, node=node))
            self._wake(node)

    def _place(self, uid: PodUid) -> NodeName | None:
        used: dict[NodeName | None, int] = {}
        for pod in self.pods.objects.values():
            if pod.phase not in ENDED:
                used[pod.node] = used.get(pod.node, 0) + 1
        free = [
            NodeName(name)
            for name, node in self.nodes.objects.items()
            if node.is_ready and node.is_healthy and not node.is_fenced
            and node.name not in self.avoided[uid]
            and used.get(node.name, 0) < self.manners.slots
        ]  # fmt: skip
        return min(free, key=lambda name: (used.get(name, 0), name)) if free else None

    # Kubelets.

    def _wake(self, name: NodeName) -> None:
        node = self.machines.get(name)
        if node is not None and not node.is_waking:
            node.is_waking = True
            self._schedule.after(self._schedule.between(0.02, 0.3), self._kubelet, node)

    def _kubelet(self, node: Node) -> None:
        node.is_waking = False
        view = self.nodes.objects.get(node.name)
        if not node.is_up or self.is_away or view is None or view.is_fenced:
            return
        wanted = {pod.uid: pod for pod in self.pods.objects.values() if pod.node == node.name}
        for uid in [uid for uid in node.locals if uid not in wanted]:
            self._discard(node.locals.pop(uid))
        for pod in wanted.values():
            local = node.locals.get(pod.uid)
            if pod.is_deleting:
                self._end(pod, local)
            elif pod.phase not in ENDED:
                self._run(node, pod, local)

    def _run(self, node: Node, pod: PodView, local: Local | None) -> None:
        if local is None:
            address = f"10.0.{int(pod.uid[4:]) // 250}.{int(pod.uid[4:]) % 250 + 1}"
            local = node.locals[pod.uid] = Local(pod.name, pod.uid, node, address)
        if local.process is None and not local.is_starting and local.phase not in ENDED:
            local.is_starting = True
            backoff = min(10.0, 2.0**local.restarts) if local.restarts > 1 else 0.0
            seconds = backoff + self.manners.start * self._schedule.between(0.5, 2.0)
            self._schedule.after(seconds, self._start, local)
        view = replace(
            pod,
            phase=local.phase,
            address=local.address if local.has_been_ready else None,
            has_been_ready=local.has_been_ready,
            reason="" if local.phase is not PodPhase.FAILED else "Error",
        )
        self.pods.put(pod.name, view)

    def _start(self, local: Local) -> None:
        local.is_starting = False
        is_known = local.node.locals.get(local.uid) is local
        is_able = local.node.has_power and not local.node.is_paused
        if not is_known or not is_able or local.is_ending:
            return
        local.phase, local.has_been_ready = PodPhase.RUNNING, True
        local.process = self._launch(local)
        self._wake(local.node.name)

    def exited(self, local: Local, *, is_success: bool) -> None:
        """The program in the container has ended, and everything with it."""
        local.process = None
        if not self.manners.restarts_containers and local.node.has_power:
            local.phase = PodPhase.SUCCEEDED if is_success else PodPhase.FAILED
        local.restarts += 1
        self._wake(local.node.name)

    def _end(self, pod: PodView, local: Local | None) -> None:
        if local is None or local.process is None:
            if local is not None and self.manners.removal and not pod.has_ended:
                local.is_ending = True
                self.pods.put(pod.name, replace(pod, has_ended=True))
                self._schedule.probes["ended_before_gone"] += 1
                self._schedule.after(self.manners.removal, self._wake, local.node.name)
                return
            local = local and local.node.locals.pop(pod.uid)
            self.pods.remove(pod.name)
        elif not local.is_ending:
            local.is_ending = True
            self._schedule.after(self.manners.grace, self._discard, local)
            local.process.terminate()

    def _discard(self, local: Local) -> None:
        local.is_ending = True
        if local.process is not None:
            local.process.kill()

    # Node lifecycle, fencing and repair.

    def _miss(self, node: Node) -> None:
        if node.down_at is None:
            node.down_at = self._schedule.now
            self._schedule.after(self.manners.not_ready_after, self._lost, node, node.down_at)

    def _lost(self, node: Node, down_at: float) -> None:
        view = self.nodes.objects.get(node.name)
        if node.down_at != down_at or view is None:
            return
        if self.is_away:
            self._schedule.after(1.0, self._lost, node, down_at)
            return
        self.nodes.put(node.name, replace(view, is_ready=False))
        if self.manners.evict_after is not None:
            self._schedule.after(self.manners.evict_after, self._evict, node, down_at)

    def _evict(self, node: Node, down_at: float) -> None:
        if node.down_at != down_at or self.is_away:
            return
        self.evicting(node)
        for pod in list(self.pods.objects.values()):
            if pod.node == node.name and not pod.is_deleting:
                self.pods.put(pod.name, replace(pod, is_deleting=True))

    def _fenced(self, node: Node) -> None:
        if node.is_up:
            return  # it came back before anybody pulled the plug
        if self.is_away:
            self._schedule.after(1.0, self._fenced, node)
            return
        view = self.nodes.objects.get(node.name)
        if view is None or view.is_fenced:
            return
        self.power_off(node)
        self._schedule.probes["fence"] += 1
        if self.manners.fence_deletes_node:
            self.nodes.remove(node.name)
        else:
            self.nodes.put(node.name, replace(view, is_fenced=True, is_ready=False))
        if self.manners.collects_fenced:
            self._schedule.after(2.0, self._collect, node)

    def _collect(self, node: Node) -> None:
        view = self.nodes.objects.get(node.name)
        if self.is_away or node.is_up or (view is not None and not view.is_fenced):
            return
        for pod in list(self.pods.objects.values()):
            if pod.node == node.name and (pod.is_deleting or view is None):
                self.pods.remove(pod.name)

    def _back(self, node: Node) -> None:
        if not node.is_up:
            return
        if self.is_away:
            self._schedule.after(1.0, self._back, node)
            return
        old = self.nodes.objects.get(node.name)
        if old is None or old.is_fenced:
            # Whoever ends a fence has first removed what was there.
            for pod in list(self.pods.objects.values()):
                if pod.node == node.name:
                    self.pods.remove(pod.name)
        is_healthy = old is None or old.is_healthy
        view = NodeView(node.name, True, is_healthy=is_healthy, topology=node.topology)
        self.nodes.put(node.name, view)
        self._wake(node.name)
