"""One link to the agent in each live pod of a job, and the memory that these agents may take.

`AgentMemory` counts their reports, evidence, and the inbox. The inbox never exceeds its bound:
links wait unread until the job has handled their messages. Reports and evidence that the job keeps
count against a budget. A job over its budget fails, and from then on only the bare state of its
agents is kept.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from typing import NamedTuple

from unbroken.agent_http.client import AgentLink, LinkResources, heartbeat_seconds
from unbroken.agent_http.identity import AgentIdentity, Proofs
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
from unbroken.foreign_numbers import whole_number
from unbroken.spec.job.ledger import PROVEN, Ledger
from unbroken.spec.job.types import JobSpec
from unbroken.wire.agent import AgentReport, ToAgent
from unbroken.wire.observation import CollectCommand, Evidence, ThreadStack

from .pods import JobIdentity
from .views import AgentPlace

BUDGET_BYTES = 16 * 1024 * 1024
BUDGET_BYTES_PER_AGENT, BUDGET_BYTES_PER_WORKER = 32 * 1024, 8 * 1024
"""Bytes that a job may take for each agent, and for each worker.

A report of 8 workers that train takes 10 to 20 KiB, one of 8 workers that died of an exception 60
KiB.
"""
WORKERS_UNKNOWN = 16
"""Workers of a node if `nprocPerNode` is no number."""
INBOX_BYTES, INBOX_BYTES_PER_AGENT = 16 * 1024 * 1024, 32 * 1024
"""Bytes of reports and evidence that wait for the job, and the addition per agent: all agents may
have news at once."""
INBOX_REPORTS, INBOX_REPORTS_PER_AGENT = 1000, 2
"""Number of reports that wait for the job, and the addition per agent; heartbeats too, which take
nearly no memory."""
SMALL_BYTES = 16 * 1024
"""Bytes up to which a report is weighed by a formula; longer ones are weighed exactly."""


class _Limits(NamedTuple):
    agents: int
    budget: int
    """Bytes of reports and evidence that are kept."""
    inbox_reports: int
    inbox_bytes: int


class AgentMemory:
    """The account of one job; `spec` None: not known yet."""

    def __init__(self, spec: Callable[[], JobSpec | None]) -> None:
        self.room = asyncio.Event()
        """Set while the inbox takes more."""
        self.room.set()
        self.heavy = asyncio.Lock()
        """Held while a long message of the job's agents is read."""
        self.is_bare = False
        """The job was over its budget: only the bare state of agents is kept."""
        self.bytes = 0
        self._spec = spec
        self._limited: JobSpec | None = None
        """The spec that the limits were computed for: they are needed at each report."""
        self._known_limits = _limits_of(None)
        self._reports: dict[PodUid, int] = {}
        self._evidence: dict[PodUid, int] = {}
        self._texts: dict[str, str] = {}
        """Frames in the evidence that is kept."""
        self._waiting: deque[int] = deque()
        self._waiting_bytes = 0

    @property
    def agents(self) -> int:
        """Return the number of agents that the job has, or will have."""
        return self._limits().agents

    @property
    def budget(self) -> int:
        """Return the bytes that reports and evidence may take."""
        return self._limits().budget

    def _limits(self) -> _Limits:
        spec = self._spec()
        if spec is not self._limited:
            self._limited, self._known_limits = spec, _limits_of(spec)
        return self._known_limits

    def largest(self) -> PodUid | None:
        """Return the pod whose agent takes most."""
        return max(self._reports, key=self._of, default=None)

    def report(self, uid: PodUid, weight: int) -> bool:
        """Keep a report instead of the last; return False if the job is now over its budget."""
        self.bytes += weight - self._reports.get(uid, 0)
        self._reports[uid] = weight
        return self.bytes <= self.budget

    def evidence(self, uid: PodUid, weight: int) -> bool:
        """Keep evidence instead of the last; return False if the job is now over its budget."""
        self.bytes += weight - self._evidence.get(uid, 0)
        self._evidence[uid] = weight
        return self.bytes <= self.budget

    def share(self, evidence: Evidence) -> tuple[Evidence, int]:
        """Return the evidence with one copy of each frame for the whole job, and the bytes that it
        adds.

        Most ranks of a job are at the same places: 100,000 ranks would otherwise take gigabytes.
        """
        known = len(self._texts)
        ranks = tuple(replace(rank, threads=self._shared(rank.threads)) for rank in evidence.ranks)
        new = islice(self._texts, known, None)
        without = replace(evidence, ranks=tuple(replace(rank, threads=()) for rank in ranks))
        frames = sum(len(thread.frames) for rank in ranks for thread in rank.threads)
        threads = sum(len(rank.threads) for rank in ranks)
        weight = weigh(without) + 256 * threads + 8 * frames + sum(map(sys.getsizeof, new))
        return replace(evidence, ranks=ranks), weight

    def _shared(self, threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
        texts = self._texts
        return tuple(
            replace(thread, frames=tuple(texts.setdefault(text, text) for text in thread.frames))
            for thread in threads
        )

    def drop_evidence(self, uid: PodUid) -> None:
        """Drop an agent's evidence: the job has used it."""
        self.bytes -= self._evidence.pop(uid, 0)
        if not self._evidence:
            self._texts.clear()

    def drop(self, uid: PodUid) -> None:
        """Drop all of a pod that is gone."""
        self.bytes -= self._reports.pop(uid, 0)
        self.drop_evidence(uid)

    def queued(self, weight: int) -> None:
        """Count a report or evidence that is put into the inbox; 0: it is kept already."""
        self._waiting.append(weight)
        self._waiting_bytes += weight
        limits = self._known_limits  # needed at each report with news
        if len(self._waiting) > limits.inbox_reports or self._waiting_bytes > limits.inbox_bytes:
            self.room.clear()

    def taken(self) -> None:
        """Count the oldest entry out of the inbox: it has been handled."""
        if not self._waiting:
            return
        self._waiting_bytes -= self._waiting.popleft()
        if self.room.is_set():
            return
        limits, waiting = self._limits(), 2 * len(self._waiting)
        # Thousands of links may wait: they are not woken for each report that is taken.
        if waiting < limits.inbox_reports and 2 * self._waiting_bytes < limits.inbox_bytes:
            self.room.set()

    def _of(self, uid: PodUid) -> int:
        return self._reports[uid] + self._evidence.get(uid, 0)


def _limits_of(spec: JobSpec | None) -> _Limits:
    agents, nproc = (spec.nnodes, spec.nproc_per_node) if spec else (0, "")
    workers = whole_number(nproc, 0, 9999)
    workers = WORKERS_UNKNOWN if workers is None else workers
    each = BUDGET_BYTES_PER_AGENT + BUDGET_BYTES_PER_WORKER * workers
    return _Limits(
        agents,
        BUDGET_BYTES + each * agents,
        INBOX_REPORTS + INBOX_REPORTS_PER_AGENT * agents,
        INBOX_BYTES + INBOX_BYTES_PER_AGENT * agents,
    )


def weigh_report(report: AgentReport, length: int) -> int:
    """Return the bytes of memory that a report takes at most; `length`: as received."""
    if length > SMALL_BYTES or report.faults or report.log_rules or report.receipts:
        return weigh(report)
    metrics = sum(len(rank_watch.metrics) for rank_watch in report.watch)
    parts = len(report.workers) + len(report.watch) + len(report.kept) + len(report.copies)
    parts += 0 if report.snapshots is None else 1 + len(report.snapshots.ranks)
    # Texts take up to four bytes a character; the rest is Python's objects.
    return 1024 + 4 * length + 256 * parts + 192 * metrics


def weigh(value: object) -> int:
    """Return the bytes of memory of a value of the wire, with everything in it."""
    if isinstance(value, Enum):
        return 0
    size = sys.getsizeof(value)
    if isinstance(value, tuple):
        size += sum(map(weigh, value))
    elif isinstance(value, Mapping):
        size += sum(weigh(key) + weigh(item) for key, item in value.items())
    elif is_dataclass(value):
        size += sum(weigh(getattr(value, field.name)) for field in fields(value))
    return size


def bare(report: AgentReport) -> AgentReport:
    """Return the state of an agent without its workers, faults, rules and receipts."""
    return replace(
        report, workers=(), faults=report.faults[:1], log_rules=(), watch=(), receipts=(),
        reason=report.reason[:200], message=report.message[:200],
    )  # fmt: skip


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

    def reports(self) -> dict[PodUid, AgentReport]:
        """Return the newest report of each agent that is connected."""
        held = self._held.items()
        return {uid: one.report for uid, one in held if one.is_up and one.report is not None}

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
            identity = AgentIdentity(self._key, uid, self._proofs, place.is_ours)
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
