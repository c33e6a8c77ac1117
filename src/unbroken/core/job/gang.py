"""Start and stop barrier of one job's agents.

All agents of an attempt start together or not at all. Workers of an attempt may start only after
every pod is proven to hold no worker of an earlier attempt. Proof is the agent's READY, its last
report before it ends, a pod that is gone, or a fenced node. An agent that cannot be asked counts as
alive. A pod that never received a start order holds no workers.

Under `IN_PROCESS_RESTART`, workers may keep their process. A worker that has left its training and
waits at its agent's barrier then counts as ended. Once that mode is withdrawn, waiting workers must
end as well.

Commands state what should be, and are repeated until a report shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from unbroken.core.snapshots.buddies import Copies
from unbroken.spec.job.types import RANKS_KEY
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    PROCESS_RESTART,
    AgentReport,
    AgentState,
    StartCommand,
    StopCommand,
    parent_of,
)

from .deadlines import Timers
from .events import JobEffect, PodUid, StartWorkers, StopWorkers
from .roster import Member, Roster, address_of, is_stock

RESEND_SECONDS_EACH = 0.001
"""Seconds of the resend interval per pod, for large jobs.

Sending an order and reading its answer takes the operator 0.3 ms (benchmarks/control_plane.py).
Orders repeated before their answers were read would take that time away from the reading.
"""
RESEND_SECONDS = 1.0
WITNESSES = 2
"""Ranks kept as witnesses; two, so that a leased rank has a witness other than itself."""


class GangStage(Enum):
    """The state that the gang is being brought to."""

    HALTED = "Halted"
    """No worker of the fenced attempts lives; the next one is prepared, if there is to be one."""
    STARTING = "Starting"
    RUNNING = "Running"


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Fields of a start command that all agents share; rank and the like are added for each
    agent."""

    attempt: int
    nnodes: int
    master_addr: str
    master_port: int
    log_rules: tuple[Mapping[str, object], ...] = ()
    detectors: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[PodUid, Copies] = field(default_factory=dict)
    """Different for each pod: the agent that gets copies of its snapshots, and agents that may hold
    some."""
    lease_seconds: float = 0.0


class Gang:
    """Barrier over the members of a roster."""

    def __init__(self, roster: Roster, commands: list[JobEffect]) -> None:
        """Append the commands of each step to `commands`."""
        self._roster = roster
        self._commands = commands
        self.stage = GangStage.HALTED
        self.fence = -1
        """The newest attempt (in HALTED) of which no worker may live before the next one starts."""
        self.unclear: Timers[PodUid] = Timers()
        """Pods that may hold workers up to the fence: since when they are asked, oldest first."""
        self.ready: set[PodUid] = set()
        self.awaited: dict[PodUid, None] = {}
        self.completed: set[PodUid] = set()
        self.ranks: dict[PodUid, int] = {}
        """Node ranks in the attempt that runs, or ran last."""
        self.kept: frozenset[PodUid] = frozenset()
        """Pods with a rank now and in the attempt before, which this operator started as well."""
        self.order: StartOrder | None = None
        self.mode = PROCESS_RESTART
        """While HALTED: `in_process_restart` if workers that can leave their training may keep
        their process, else `process_level_restart`."""
        self.last_clear: PodUid | None = None
        """The pod that became clear last (in HALTED); None: all were from the beginning."""
        self.witnesses: dict[PodUid, float] = {}
        """While HALTED: the first two ranks of the last attempt that were proven to run it no
        longer.

        The value is the time since when the rank has not vouched for the attempt to its peers.
        Ranks that never vouched come before all others.
        """
        self.last_ready: PodUid | None = None
        self.last_started: PodUid | None = None
        self._is_graceful = False
        self._resend_at: float | None = None

    def deadline(self) -> float | None:
        """Return when commands are sent again."""
        return self._resend_at

    def halt(
        self, through: int, now: float, *, mode: str = PROCESS_RESTART, is_graceful: bool = False
    ) -> None:
        """Stop every attempt up to `through`, on every agent that may still run one."""
        self.stage, self.fence, self._is_graceful = GangStage.HALTED, through, is_graceful
        self.mode, self.last_clear, self.last_ready = mode, None, None
        self.awaited.clear()
        self.completed.clear()
        self._resend_at = None
        members = self._roster.members
        unclear = [uid for uid, member in members.items() if not self._is_clear(member)]
        self.unclear = Timers(dict.fromkeys(unclear, now))
        self.witnesses = {}
        for uid in self.ranks:
            self._witness(uid, now)
        self.ready = {uid for uid, member in members.items() if self.is_ready(member)}
        self._stop(self.unclear, now)

    def start(self, order: StartOrder, ranks: Mapping[PodUid, int], now: float) -> None:
        """Start the attempt on these pods; the caller has seen that `may_start` holds."""
        assert self.stage is GangStage.HALTED
        assert not self.unclear
        self._enter_start(order, ranks)
        self._start(now)

    def resume(
        self,
        order: StartOrder,
        ranks: Mapping[PodUid, int],
        now: float,
        *,
        completed: Iterable[PodUid],
    ) -> None:
        """Take over an attempt that an earlier operator has started."""
        self._enter_start(order, ranks)
        for uid, member in self._roster.members.items():
            if uid in ranks:
                member.ordered = order.attempt
            elif member.report is None or member.state is AgentState.READY:
                # It runs, so every pod was clear of what came before, heard or not.
                member.clear_through = max(member.clear_through, self.fence)
        self.completed = set(completed)
        for uid in list(self.awaited):
            self._observe_start(self._roster.members[uid])
        self.last_started = None  # Who was the last of these is not known.
        if self.awaited:
            self._start(now)
        for member in self._roster.members.values():
            self._stop_stranger(member, now)

    def observe(self, member: Member, now: float) -> None:
        """Take what has become known of a member: its report, its loss, its node."""
        if self.stage is not GangStage.HALTED:
            self._observe_start(member)
            self._stop_stranger(member, now)
            return
        uid, is_clear = member.uid, self._is_clear(member)
        if is_clear:
            if self.unclear.pop(uid, None) is not None:
                self.last_clear = uid
            self._witness(uid, now)
            self._resend_at = self._resend_at if self.unclear else None
        elif uid not in self.unclear:
            self.unclear[uid] = now
        if is_clear and _can_start(member):
            self.last_ready = self.last_ready if uid in self.ready else uid
            self.ready.add(uid)
        else:
            self.ready.discard(uid)
        was_asked = member.asked >= self.fence and self._resend_at is not None
        if uid in self.unclear and member.report is not None and not was_asked:
            self.unclear.restart(uid, now)
            self._stop([uid], now)

    def stuck(self, now: float, seconds: float) -> list[PodUid]:
        """Pods that have not shown for so long that they are clear; each once in that time."""
        found = self.unclear.expire(now, seconds)
        for uid in found:
            self.unclear[uid] = now
        return found

    def forget(self, uid: PodUid) -> None:
        """The pod is gone, or must not be used any more."""
        self.ready.discard(uid)
        if uid not in self._roster.members:
            self.unclear.pop(uid, None)
            self.awaited.pop(uid, None)

    def is_ready(self, member: Member) -> bool:
        """True if the pod can start the next attempt."""
        return _can_start(member) and self._is_clear(member)

    def _witness(self, uid: PodUid, now: float) -> None:
        """Note a rank that runs the last attempt no longer."""
        if uid not in self.ranks or uid in self.unclear or uid in self.witnesses:
            return
        member, order = self._roster.members.get(uid), self.order
        report = None if member is None else member.report
        # After a report from before its end it may have vouched.
        if report is not None and report.state is AgentState.READY and order is not None:
            now = -math.inf if report.unvouched == order.attempt else now
        if len(self.witnesses) == WITNESSES:
            newest = max(reversed(self.witnesses), key=self.witnesses.__getitem__)
            if now >= self.witnesses[newest]:
                return
            del self.witnesses[newest]
        self.witnesses[uid] = now

    def tick(self, now: float) -> None:
        """Repeat what is due."""
        if self._resend_at is None or now < self._resend_at:
            return
        self._resend_at = None
        if self.stage is GangStage.HALTED:
            self._stop(self.unclear, now)
        else:
            self._start(now)

    def reports(self) -> Iterator[tuple[Member, AgentReport]]:
        """Yield the pods with a rank that report the attempt of the order, and these reports."""
        order = self.order
        for uid in () if order is None else self.ranks:
            member = self._roster.members.get(uid)
            report = None if member is None else member.report
            if member and order and report and member.attempt_of(report) == order.attempt:
                yield member, report

    def is_training(self, uid: PodUid) -> bool:
        """True if the pod's workers should live now."""
        return (
            self.stage is not GangStage.HALTED and uid in self.ranks and uid not in self.completed
        )

    def is_empty(self, member: Member) -> bool:
        """True if no worker of the job can live in the pod until it is ordered to start one."""
        if self.stage is GangStage.HALTED:
            return self._is_clear(member)
        is_spare = member.uid not in self.ranks and self._roster.is_clear(member, self.fence)
        return is_spare or member.uid in self.completed

    def check(self) -> None:
        """Invariants; cheap enough to stay on in production."""
        if self.stage is GangStage.HALTED:
            assert not self.awaited
            return
        assert self.order is not None
        assert self.order.attempt > self.fence
        assert (self.stage is GangStage.RUNNING) == (not self.awaited)

    def _enter_start(self, order: StartOrder, ranks: Mapping[PodUid, int]) -> None:
        self.kept = frozenset(ranks.keys() & self.ranks.keys())
        self.stage, self.order, self.ranks = GangStage.STARTING, order, dict(ranks)
        self.fence = order.attempt - 1
        self.awaited, self.last_started = dict.fromkeys(ranks), None
        self.completed.clear()

    def _observe_start(self, member: Member) -> None:
        report, uid = member.report, member.uid
        if report is None or self.order is None or uid not in self.ranks:
            return
        if member.attempt_of(report) == self.order.attempt:
            if report.state is AgentState.COMPLETED:
                self.completed.add(uid)
            is_begun = report.state in (AgentState.RUNNING, AgentState.COMPLETED)
            if is_begun and uid in self.awaited:
                del self.awaited[uid]
                self.last_started = uid
        if self.stage is GangStage.STARTING and not self.awaited:
            self.stage, self._resend_at = GangStage.RUNNING, None

    def _stop_stranger(self, member: Member, now: float) -> None:
        """Stop a pod that runs something it was not ordered to run, or keeps processes in vain."""
        assert self.order is not None
        uid, report = member.uid, member.report
        if report is None or uid in self.ranks:
            return
        if report.state is AgentState.READY and report.kept:
            self._commands.append(StopWorkers(uid, StopCommand(self.fence)))
            return
        if self._roster.is_clear(member, self.fence + 1):
            return
        attempt = self.order.attempt if member.runs_unordered else member.attempt_of(report)
        if report.state is AgentState.READY or attempt is None or member.asked >= attempt:
            return
        member.asked = attempt
        self._commands.append(StopWorkers(uid, StopCommand(attempt)))

    def _resend_seconds(self) -> float:
        return max(RESEND_SECONDS, RESEND_SECONDS_EACH * len(self._roster.members))

    def _is_clear(self, member: Member) -> bool:
        report = member.report
        if not self._roster.is_clear(member, self.fence):
            return False
        if report is None or member.is_dead:
            return True
        if report.state is AgentState.READY and report.kept:
            return self.mode != PROCESS_RESTART
        # On a stop command the agent starts new workers in place of the worker that has ended.
        return not (member.broke_early and member.early_attempt <= self.fence)

    def _stop(self, uids: Iterable[PodUid], now: float) -> None:
        # One object for all alike: thousands are sent at once, and its frame is kept.
        stops = {
            (mode, is_graceful): StopCommand(self.fence, mode, is_graceful)
            for mode in (self.mode, PROCESS_RESTART)
            for is_graceful in (False, True)
        }
        for uid in sorted(uids):
            member = self._roster.members[uid]
            if member.report is not None:
                member.asked = max(member.asked, self.fence)
                mode = self.mode if _can_keep(member.report) else PROCESS_RESTART
                # The kubelet's SIGTERM may come later, and must find the workers in their grace.
                is_graceful = self._is_graceful or member.view.is_deleting
                self._commands.append(StopWorkers(uid, stops[mode, is_graceful]))
        if self._resend_at is None and self.unclear:
            self._resend_at = now + self._resend_seconds()

    def _start(self, now: float) -> None:
        order = self.order
        assert order is not None
        command = StartCommand(
            order.attempt, 0, order.nnodes, order.master_addr, order.master_port, order.log_rules,
            order.detectors, lease_seconds=order.lease_seconds,
        )  # fmt: skip
        addresses = self._addresses() if order.lease_seconds else {}
        for uid in sorted(self.awaited, key=lambda uid: self.ranks[uid]):
            member = self._roster.members.get(uid)
            if member is None or member.lost_why:
                continue
            member.ordered = order.attempt
            member.clear_through = min(member.clear_through, order.attempt - 1)
            copies = order.copies.get(uid, Copies())
            rank = self.ranks[uid]
            parent = addresses.get(parent_of(rank), "")
            of_node = replace(command, rank=rank, parent=parent, **copies._asdict())
            if member.report is not None and is_stock(member.report):
                of_node = self._for_stock(of_node, member.report.restart_mode)
            self._commands.append(StartWorkers(uid, of_node))
        self._resend_at = now + self._resend_seconds()

    def _addresses(self) -> dict[int | None, str]:
        """The agents of the ranks that others ask, by rank."""
        parents = {parent_of(rank) for rank in self.ranks.values()}
        members = self._roster.members
        return {
            rank: address
            for uid, rank in self.ranks.items()
            if rank in parents and (address := address_of(members.get(uid)))
        }

    def _for_stock(self, command: StartCommand, mode: str) -> StartCommand:
        """The same for an agent that knows the documented keys alone."""
        rules = _documented(command.log_rules)
        command = replace(command, log_rules=rules, detectors={})
        command = replace(command, lease_seconds=0.0, parent="")
        if mode != IN_PROCESS_RESTART:
            return command
        # Without a table of addresses it does not let its workers begin (HyperPod agent 1.1.3).
        # The table is whole each time, so that nothing depends on what an agent has kept.
        members = self._roster.members
        placed = {r: members[uid].view.address for uid, r in self.ranks.items() if uid in members}
        table = tuple((rank, ip) for rank, ip in sorted(placed.items()) if ip is not None)
        return replace(command, ip_version=str(command.attempt), rank_ips=table)


def _can_start(member: Member) -> bool:
    """True if the pod stays, and its agent waits to be started."""
    report = member.report
    if report is None or member.lost_why or member.condemned or member.view.is_deleting:
        return False
    is_offered = report.offered_port is not None or is_stock(report)
    return report.state is AgentState.READY and is_offered


def _can_keep(report: AgentReport) -> bool:
    """A stock agent was started for one way or the other."""
    return not is_stock(report) or report.restart_mode == IN_PROCESS_RESTART


def _documented(rules: Iterable[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
    """Log rules with the keys of the CRD alone, for agents that know no others."""
    return tuple({k: v for k, v in rule.items() if k != RANKS_KEY} for rule in rules)
