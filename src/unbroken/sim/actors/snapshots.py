"""Snapshots in the memory of agents: saves, copies at buddies, and restores.

Every rank saves at intervals while its attempt trains; its agent sends a copy to the buddy in its
orders. When an attempt begins, its ranks take the newest step that each of them can have: in its
agent's memory, or in that of the holders in its orders. A process that dies loses its memory.
Rules: a copy that is alive in the gang can be found, and an incident records what was restored.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from unbroken.core.job.events import NodeName, PodUid
from unbroken.sim.schedule import Schedule
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.types import JobStatus, Switch
from unbroken.wire.agent import PORT, AgentReport, Receipt, StartCommand
from unbroken.wire.agent_bodies import HOLDERS_MAX

from .training import Gathering, Training, Worker

KEPT = 2
"""Newest ones of each rank that are kept."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Saves of a world."""

    every_seconds: float = 3.0
    lag_seconds: float = 0.5
    """Seconds until a copy is with the buddy."""
    is_told: bool = False
    """Agents report of whom they have copies."""
    buddy: Switch = Switch.ON


class Kept(NamedTuple):
    """One state of one rank."""

    attempt: int
    step: int


class Host(Protocol):
    """An agent, as snapshots see it."""

    id: str
    is_alive: bool
    told: StartCommand | None

    def report(self) -> AgentReport:
        """Return the agent's state."""

    def publish(self) -> None:
        """Send the state over its links again."""


@dataclass(frozen=True, slots=True)
class Home:
    """Location of a pod with a living agent."""

    uid: PodUid
    node: NodeName
    agent: Host


Memory = dict[str, dict[int, list[Kept]]]
"""States by agent and global rank, newest first."""


class Snapshots:
    """All of one world."""

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        keeping: Keeping,
        seed: int,
        homes: Callable[[], dict[str, Home]],
        nproc: int,
    ) -> None:
        self._schedule = schedule
        self._random = random.Random(f"snapshots of {seed}")
        self._training = training
        self._keeping = keeping
        self._homes = homes
        """Agents that can be reached, by the address of their pod."""
        self._nproc = nproc
        self._own: Memory = {}
        self._copies: Memory = {}
        self._receipts: dict[str, dict[int, Receipt]] = {}
        """Receipts of the attempt that runs, by agent and rank."""
        self._ordered: dict[tuple[int, int], dict[PodUid, StartCommand]] = {}
        """Orders by epoch and attempt."""
        self._orderers: dict[tuple[int, int], dict[PodUid, int]] = {}
        """Generations of the operators that gave these orders."""
        self.restored: dict[int, dict[int, Receipt]] = {}
        """Receipts of an attempt, by rank."""

    # Actions of the workers.

    def begun(self, place: Gathering) -> None:
        """Restore and save, once all workers of an attempt have begun."""
        workers = list(place.members.values())
        homes = self._homes()
        options = {worker.rank: self._options(worker, homes) for worker in workers}
        common = set.intersection(*(set(option) for option in options.values()))
        self.restored[workers[0].attempt] = {}
        if common:
            newest = max(common)
            for worker in workers:
                self._restore(worker, newest, options[worker.rank][newest], homes)
        self._schedule.after(self._keeping.every_seconds, self._save, place)

    def _options(self, worker: Worker, homes: dict[str, Home]) -> dict[Kept, str]:
        """Return the states that a rank could continue with, and their sources."""
        result: dict[Kept, str] = {}
        agent = next((h.agent for h in homes.values() if h.agent.id == worker.agent), None)
        holders = agent.told.holders if agent is not None and agent.told is not None else ()
        for address in holders:
            home = homes.get(address.rpartition(":")[0])
            if home is not None and home.agent.told is not None:
                source = f"buddy {home.agent.told.rank}"
                for kept in self._copies.get(home.agent.id, {}).get(worker.rank, ()):
                    result.setdefault(kept, source)
        for kept in self._copies.get(worker.agent, {}).get(worker.rank, ()):
            result[kept] = "memory"
        result |= dict.fromkeys(self._own.get(worker.agent, {}).get(worker.rank, ()), "memory")
        return result

    def _restore(self, worker: Worker, kept: Kept, source: str, homes: dict[str, Home]) -> None:
        if source != "memory":
            self._schedule.probes["restored_from_buddy"] += 1
        seconds = self._random.uniform(0.01, 0.5)
        receipt = Receipt(
            worker.rank, worker.attempt, kept.step, source, seconds, "", kept.attempt, "state"
        )
        self.restored[worker.attempt][worker.rank] = receipt
        agent = next((h.agent for h in homes.values() if h.agent.id == worker.agent), None)
        if agent is not None:
            self._schedule.after(seconds, self._tell, worker, agent, receipt)

    def _tell(self, worker: Worker, agent: Host, receipt: Receipt) -> None:
        if worker.exit is None and agent.is_alive:
            told = self._receipts.setdefault(agent.id, {})
            told[worker.rank] = receipt
            agent.publish()

    def _save(self, place: Gathering) -> None:
        """Every rank of an attempt that trains saves, and its agent copies."""
        if place.is_broken or place.is_done or place.trains_since is None:
            return
        step = self._training.steps + int(self._schedule.now - place.trains_since)
        homes = {home.agent.id: home.agent for home in self._homes().values()}
        for worker in place.members.values():
            agent = homes.get(worker.agent)
            if agent is None or worker.exit is not None:
                continue
            kept = Kept(worker.attempt, step)
            _keep(self._own, agent.id, worker.rank, kept)
            buddy = agent.told.buddy if agent.told is not None else ""
            if buddy:
                seconds = self._keeping.lag_seconds * self._random.uniform(0.5, 1.5)
                self._schedule.after(seconds, self._copy, agent, buddy, worker.rank, kept)
        self._schedule.after(self._keeping.every_seconds, self._save, place)

    def _copy(self, agent: Host, buddy: str, rank: int, kept: Kept) -> None:
        home = self._homes().get(buddy.rpartition(":")[0])
        if home is None or not agent.is_alive:
            return
        newest = home.agent.report().newest_attempt
        if newest is not None and newest > kept.attempt:
            return
        had = self._copied(home.agent)
        _keep(self._copies, home.agent.id, rank, kept)
        if self._keeping.is_told and self._copied(home.agent) != had:
            home.agent.publish()

    def _copied(self, agent: Host) -> tuple[int, ...]:
        return tuple(sorted({rank // self._nproc for rank in self._copies.get(agent.id, ())}))

    def report(self, agent: str, report: AgentReport) -> AgentReport:
        """Return the report of an agent with its workers' receipts, and the copies in its
        memory."""
        receipts = tuple(
            receipt
            for receipt in self._receipts.get(agent, {}).values()
            if receipt.attempt == report.attempt
        )
        nodes = {rank // self._nproc for rank in self._copies.get(agent, ())}
        copies = tuple(sorted(nodes)) if self._keeping.is_told else ()
        if not receipts and not copies:
            return report
        return replace(report, receipts=receipts, copies=copies)

    # Rules.

    def ordered(
        self, epoch: int, generation: int, pod: PodUid, command: StartCommand
    ) -> Iterator[str]:
        """Yield errors in the orders of an attempt, once all of its pods have one."""
        orders = self._ordered.setdefault((epoch, command.attempt), {})
        orderers = self._orderers.setdefault((epoch, command.attempt), {})
        orderers[pod] = generation
        address = (command.master_addr, command.master_port)
        for uid, order in list(orders.items()):
            is_other = (order.master_addr, order.master_port) != address
            if orderers[uid] < generation and (is_other or order.rank == command.rank):
                # a dead operator ordered it, and this pod never received the order
                del orders[uid]
        is_new = pod not in orders
        orders[pod] = command
        if is_new and len(orders) == command.nnodes:
            by_uid = {home.uid: (address, home) for address, home in self._homes().items()}
            # An unreachable pod got its order a moment ago.
            if orders.keys() <= by_uid.keys():
                result = {uid: by_uid[uid] for uid in orders}
                early = {uid for uid in orders if orderers[uid] < generation}
                yield from self._judge_buddies(orders, result, early)
                yield from self._judge_holders(orders, result, early)

    def _judge_buddies(
        self,
        orders: dict[PodUid, StartCommand],
        homes: dict[PodUid, tuple[str, Home]],
        early: set[PodUid],
    ) -> Iterator[str]:
        """Check the buddies. `early`: pods with orders of an operator that has died since, which
        made its own choice.

        A running agent gets no new buddy if the old one's pod is lost, or has no rank any more.
        """
        named = [command.buddy for command in orders.values()]
        if self._keeping.buddy is Switch.OFF or len(orders) < 2:
            if any(named):
                yield "a buddy is named where there is to be none"
            return
        nodes = {f"{address}:{PORT}": home.node for address, home in homes.values()}
        hosts = Counter(nodes.values())
        for uid, command in orders.items():
            address, home = homes[uid]
            if uid in early and command.buddy and command.buddy not in nodes:
                continue
            if command.buddy not in nodes or command.buddy == f"{address}:{PORT}":
                yield f"{command.buddy!r} is no buddy of rank {command.rank}"
            elif nodes[command.buddy] == home.node and len(hosts) > 1:
                yield f"the buddy of rank {command.rank} is on its node"
        largest = max(hosts.values())
        others = len(orders) - largest
        least = max(1, -(-largest // others)) if others else 1
        if max(Counter(named).values()) > least and not early:
            yield "one is the buddy of more than it must be"

    def _judge_holders(
        self,
        orders: dict[PodUid, StartCommand],
        homes: dict[PodUid, tuple[str, Home]],
        early: set[PodUid],
    ) -> Iterator[str]:
        """Check the holders. `early`: as for the buddies; that operator could not know of copies
        that came later."""
        for uid, command in orders.items():
            if uid in early:
                continue
            ranks = range(command.rank * self._nproc, (command.rank + 1) * self._nproc)
            for other, (address, home) in homes.items():
                copies = self._copies.get(home.agent.id, {})
                kept = [copy for rank in ranks for copy in copies.get(rank, ())]
                has = other != uid and any(one.attempt < command.attempt for one in kept)
                is_named = f"{address}:{PORT}" in command.holders
                if has and is_named:
                    self._schedule.probes["holder_is_known"] += 1
                elif has and len(orders) <= HOLDERS_MAX:
                    yield f"{address} has copies of rank {command.rank}, and is not asked"

    def judge_end(
        self, incidents: Iterable[Incident], status: JobStatus, newest: int
    ) -> Iterator[str]:
        """Yield facts that the incident before the last attempt lacks."""
        start = status.start_time or 0.0
        past = [i for i in incidents if i.detected_at >= start and i.attempt < newest]
        told = {
            rank
            for item in self._receipts.values()
            for rank, r in item.items()
            if r.attempt == newest
        } & self.restored.get(newest, {}).keys()
        if not past or not told:
            return
        last = max(past, key=lambda incident: incident.number)
        self._schedule.probes["receipts"] += 1
        if sum(restored.count for restored in last.restored) != len(told):
            yield f"receipts are missing: {last.restored} of ranks {sorted(told)}"
        step = min(receipt.step for receipt in self.restored[newest].values())
        lost = None if last.step is None else max(last.step - step, 0)
        if last.steps_lost != lost:
            yield f"{last.steps_lost} steps are said to be lost, and {lost} were"


def _keep(memory: Memory, agent: str, rank: int, kept: Kept) -> None:
    result = memory.setdefault(agent, {}).setdefault(rank, [])
    result.insert(0, kept)
    del result[KEPT:]
