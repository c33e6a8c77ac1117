"""One link to the agent in each live pod of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from unbroken.agent_http.client import AgentLink, LinkResources, heartbeat_seconds
from unbroken.agent_http.identity import Identity, Proofs
from unbroken.core.job.events import (
    AgentLost,
    AgentReported,
    AgentsTooLarge,
    EvidenceReceived,
    JobEvent,
    PodHeld,
    PodPhase,
    PodUid,
    PodView,
)
from unbroken.core.job.obstacles import AGENT_SHARED, NOT_PROVEN
from unbroken.core.job.roster import is_loopback, is_stock
from unbroken.spec.job.ledger import PROVEN, Ledger
from unbroken.wire.agent import AgentReport, ToAgent
from unbroken.wire.observation import CollectCommand, Evidence

from .agent_memory import AgentMemory, bare, weigh_report
from .pods import JobIdentity
from .views import AgentPlace


@dataclass(slots=True)
class _Held:
    address: str
    place: AgentPlace
    link: AgentLink
    task: asyncio.Task[None]
    is_up: bool = False
    stock_id: str = ""
    """ID of HyperPod's own agent that serves the pod; empty: none does."""
    received: AgentReport | None = None
    """Newest report as the agent sent it; heartbeats repeat this very object."""
    report: AgentReport | None = None
    """The same report as passed to the job."""


@dataclass(slots=True)
class StockHolders:
    """The pod that each of HyperPod's own agents serves, of all jobs.

    A pod holds its agent until it is gone, also when its job is deleted before: a new job of the
    same name must not take the agents of the old one.
    """

    _holders: dict[tuple[str, str], tuple[PodUid, JobIdentity]] = field(default_factory=dict)
    """The first pod at whose address an agent answered, and its job."""
    _agents: dict[PodUid, tuple[str, str]] = field(default_factory=dict)

    def job(self, address: str, agent_id: str, uid: PodUid, job: JobIdentity) -> JobIdentity:
        """Return the job that the agent serves: that of this pod, unless another one has it."""
        agent = _agent_key(address, agent_id)
        if agent not in self._holders:
            self.release(uid)
            self._holders[agent] = (uid, job)
            self._agents[uid] = agent
        return self._holders[agent][1]

    def release(self, uid: PodUid) -> None:
        """Note that the pod is gone, or served by its agent no longer."""
        agent = self._agents.pop(uid, None)
        if agent is not None:
            del self._holders[agent]


@dataclass(frozen=True, slots=True)
class StockAgents:
    """The pod that each of HyperPod's own agents serves, for one job.

    Such an agent may listen on all addresses of its machine, and so answer at those of other pods
    there. Those of the same job are known to the job (`Roster.other_with`).
    """

    holders: StockHolders
    own: JobIdentity

    def other_job(self, address: str, agent_id: str, uid: PodUid) -> str:
        """Name the other job whose pod the agent serves; empty: it may serve this pod."""
        job, own = self.holders.job(address, agent_id, uid, self.own), self.own
        if job.uid == own.uid:
            return ""
        is_earlier = (job.namespace, job.name) == (own.namespace, own.name)
        return f"{'the earlier job' if is_earlier else 'job'} {job.namespace}/{job.name}"


def _agent_key(address: str, agent_id: str) -> tuple[str, str]:
    """Return what tells an agent from those of other machines, which may choose the same ID."""
    return ("" if is_loopback(address) else address, agent_id)


class AgentLinks:
    """Links by pod; a pod whose address changes gets a new one."""

    def __init__(
        self,
        key: bytes | None,
        proofs: Proofs,
        receive: Callable[[JobEvent], None],
        tasks: asyncio.TaskGroup,
        memory: AgentMemory,
        shared: LinkResources,
        stock_agents: StockAgents,
    ) -> None:
        self._key = key
        self._proofs = proofs
        self._receive = receive
        self._tasks = tasks
        self._shared = shared
        self._memory = memory
        self._stock_agents = stock_agents
        self._held: dict[PodUid, _Held] = {}

    def found(self, ledger: Ledger) -> None:
        """Take what is recorded of the job's agents: they are not known to this operator yet."""
        self._proofs.is_given |= ledger.agents == PROVEN

    def follow(self, pod: PodView, place: AgentPlace) -> None:
        """Keep, make or end the link of a pod in its present state."""
        held = self._held.get(pod.uid)
        if pod.address is None or pod.phase not in (PodPhase.RUNNING, PodPhase.UNKNOWN):
            self.drop(pod.uid)
        elif held is None or (held.address, held.place.port) != (pod.address, place.port):
            self._make(pod.uid, pod.address, place)
        elif held.place != place and not held.is_up:
            # Its container was started again: look for the agent at once, not at the old link's
            # next retry.
            self._make(pod.uid, pod.address, place)

    def drop(self, uid: PodUid) -> None:
        """End the link of a pod that is gone."""
        held = self._held.pop(uid, None)
        if held is not None:
            held.task.cancel()
            self._stock_agents.holders.release(uid)
            self._memory.drop(uid)

    def counts(self) -> tuple[int, int]:
        """Return the number of agents that are connected, and of those that should be."""
        return sum(held.is_up for held in self._held.values()), len(self._held)

    def send(self, uid: PodUid, message: ToAgent) -> bool:
        """Send an agent a message; return False if there is no link: the job repeats it later."""
        if isinstance(message, CollectCommand):
            self._memory.drop_evidence(uid)
        held = self._held.get(uid)
        if held is not None:
            held.link.send(message)
        return held is not None

    def _make(self, uid: PodUid, address: str, place: AgentPlace) -> None:
        self.drop(uid)

        def on_report(report: AgentReport) -> None:
            held.is_up = True
            if not self._is_of_other_job(uid, held, report):
                self._report(uid, held, report)

        def on_lost(why: str) -> None:
            held.is_up = False
            self._receive(AgentLost(uid, why, held.link.silent_seconds()))

        def on_evidence(evidence: Evidence) -> None:
            self._evidence(uid, evidence)

        def on_stranger(why: str) -> None:
            self._shared.on_stranger(why)
            self._receive(PodHeld(uid, NOT_PROVEN, why))

        def on_unproven() -> None:
            if held.stock_id and not self._proofs.is_served:
                self._proofs.is_served = True
                self._shared.on_unproven()

        identity = None
        if self._key is not None:
            identity = Identity(self._key, uid, self._proofs, place.is_ours)
        agents = max(self._shared.turns.links, self._memory.agents)
        heartbeat = heartbeat_seconds(agents)
        shared = replace(
            self._shared,
            heartbeat_seconds=heartbeat,
            on_stranger=on_stranger,
            on_unproven=on_unproven,
        )
        heard = (on_report, on_lost, on_evidence)
        link = AgentLink(address, place.port, identity, *heard, shared)
        held = _Held(address, place, link, self._tasks.create_task(link.run()))
        self._held[uid] = held

    def _is_of_other_job(self, uid: PodUid, held: _Held, report: AgentReport) -> bool:
        """Return whether the agent serves a pod of another job; say so if it does."""
        if not is_stock(report):
            return False
        if held.stock_id != report.agent_id:
            self._stock_agents.holders.release(uid)
            held.stock_id = ""
        job = self._stock_agents.other_job(held.address, report.agent_id, uid)
        if job:
            text = f"the agent of a pod of {job} answers at its port {held.place.port}"
            self._receive(PodHeld(uid, AGENT_SHARED, text))
            return True
        held.stock_id = report.agent_id
        return False

    def _report(self, uid: PodUid, held: _Held, report: AgentReport) -> None:
        """Pass a report to the job, within its budget."""
        memory, weight = self._memory, 0
        if held.received is not report or held.report is None:
            weight = weigh_report(report, held.link.report_bytes)
            if not memory.is_bare and not memory.report(uid, weight):
                self._too_large()
            held.received, held.report = report, report
        if memory.is_bare:
            held.link.forget()
            held.received, held.report = None, bare(report)
            weight = weigh_report(held.report, 0)
            memory.report(uid, weight)
        memory.queued(weight)
        self._receive(AgentReported(uid, held.report))

    def _evidence(self, uid: PodUid, evidence: Evidence) -> None:
        if self._memory.is_bare or uid not in self._held:
            return
        evidence, weight = self._memory.share(evidence)
        if not self._memory.evidence(uid, weight):
            self._too_large()
        self._memory.queued(weight)
        self._receive(EvidenceReceived(uid, evidence))

    def _too_large(self) -> None:
        memory = self._memory
        memory.is_bare = True
        self._receive(AgentsTooLarge(memory.bytes, memory.budget, memory.largest()))
