"""Adoption of a running job by a new operator: continue, join a start under way, or restart.

The status and the agents' answers hold all that is needed. A job that runs is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from unbroken.core.job.recovery.incidents import OPERATOR_RESTARTED
from unbroken.core.job.recovery.ladder import Pods, rung_of
from unbroken.core.job.recovery.recovery import Recovery
from unbroken.spec.job.incident import Symptom
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import AgentReport, AgentState

from .events import PodPhase, PodUid
from .gang import GangStage
from .life import Life, as_port
from .recovery import symptoms
from .roster import UNHEARD, Member, Ranks, is_stock
from .state import JobState
from .transitions import Phase

ADOPT_SECONDS = 10.0
"""Seconds that a new operator waits for answers from agents that may run something."""

_BEGUN = (AgentState.RUNNING, AgentState.COMPLETED)
_BROKEN = (AgentState.FAULTED, AgentState.STOPPING)


@dataclass(slots=True)
class NewestAttempt:
    """The newest attempt that any agent knows, and the agents' reports about it."""

    attempt: int
    running: list[Member] = field(default_factory=list)
    """Members that run or have completed it."""
    broken: list[Member] = field(default_factory=list)
    """Members that have failed in it, or are stopping."""
    stopped: list[Member] = field(default_factory=list)
    """Members that ran none of it and never will."""
    masters: set[tuple[str, int]] = field(default_factory=set)

    @property
    def is_untouched(self) -> bool:
        """True if no agent has ever received an order for the attempt."""
        return not (self.running or self.broken or self.stopped)

    @property
    def is_sound(self) -> bool:
        """True if the attempt can continue where it runs."""
        return bool(self.running) and not self.broken and not self.stopped and self._is_complete

    @property
    def _is_complete(self) -> bool:
        ranks = [m.report.rank for m in self.running if m.report]
        return len(self.masters) <= 1 and len(set(ranks)) == len(ranks) and None not in ranks


def sort_members(
    members: Iterable[Member], status_attempt: int, stock_attempt: int
) -> NewestAttempt:
    """Sort the members by their agents' reports.

    A report that names no attempt comes from a stock agent, and means the stock attempt.
    """
    heard = [(member, member.report) for member in members if member.report is not None]
    newest = (attempt for _, report in heard for attempt in (report.newest_attempt, report.attempt))
    finding = NewestAttempt(max((a for a in newest if a is not None), default=status_attempt))
    finding.attempt = max(finding.attempt, status_attempt)
    for member, report in heard:
        is_part = _is_part(report) and not report.is_unstarted
        if is_part and member.ordered is None and is_stock(report):
            member.ordered = stock_attempt
        _sort(finding, member, report)
    return finding


def _is_part(report: AgentReport) -> bool:
    """True if workers of the attempt run, or have run, under the agent.

    A stock agent that shuts down still has the rank of its workers, which may not have ended yet.
    """
    is_ending = report.state is AgentState.SHUTDOWN and is_stock(report)
    return report.state in (*_BEGUN, *_BROKEN) or (is_ending and report.rank is not None)


def _is_away(member: Member) -> bool:
    return bool(member.lost_why or member.condemned or member.view.is_deleting)


def _is_unheard(member: Member) -> bool:
    """True if the pod may run anything, and its agent has not answered."""
    return member.report is None and member.clear_through == UNHEARD


def _claim(member: Member) -> tuple[bool, int]:
    """Return the place of a member's claim to the rank that it reports; the first one counts."""
    newest = None if member.report is None else member.report.newest_attempt
    return _is_away(member), 0 if newest is None else -1 - newest


def _is_idle(member: Member) -> bool:
    return member.state is AgentState.READY and not _is_away(member)


def _sort(finding: NewestAttempt, member: Member, report: AgentReport) -> None:
    if _is_part(report):
        if member.attempt_of(report) != finding.attempt:
            return
        (finding.running if report.state in _BEGUN else finding.broken).append(member)
        if report.master_addr is not None and report.master_port is not None:
            finding.masters.add((report.master_addr, report.master_port))
    elif report.newest_attempt is not None and report.newest_attempt >= finding.attempt:
        finding.stopped.append(member)


def _lease_of(running: Iterable[Member]) -> float:
    """Return the lease that an earlier operator started an attempt under, in seconds; 0: none."""
    known = [member.report.lease_seconds or 0.0 for member in running if member.report]
    return max(known, default=0.0) if all(known) else 0.0


class Adoption:
    """The way of one job from UNKNOWN to where it was when its last operator went."""

    def __init__(self, state: JobState, life: Life, recovery: Recovery) -> None:
        self._state = state
        self._life = life
        self._recovery = recovery
        self._unheard: set[PodUid] = set()
        self._by: float | None = None

    def deadline(self) -> float | None:
        """Return when adoption decides without further answers."""
        return self._by if self._state.phase is Phase.ADOPTING else None

    def begin(self, now: float) -> None:
        """Ask every agent that may run something. No agent is presumed lost at once."""
        state = self._state
        state.enter(Phase.ADOPTING)
        for uid, member in state.roster.members.items():
            is_up = member.view.phase is PodPhase.RUNNING and not member.view.is_deleting
            if is_up and member.report is None and not state.roster.is_cut_off(member):
                self._unheard.add(uid)
        self._by = now + ADOPT_SECONDS

    def answered(self, uid: PodUid) -> None:
        """The agent has answered, or cannot any more."""
        self._unheard.discard(uid)

    def advance(self, now: float) -> bool:
        """Adopt once every agent has answered, or the time for answers is over. Return True if the
        job was adopted now."""
        if self._is_overtaken():
            return self._join(now)
        due = self._by is not None and now >= self._by
        if self._state.phase is not Phase.ADOPTING or (self._unheard and not due):
            return False
        self._by = None
        self._unheard.clear()
        self._adopt(now)
        return True

    def _is_overtaken(self) -> bool:
        """True if orders of the earlier operator arrived after the adoption: agents run the attempt
        that is being prepared, and this operator has started none."""
        state = self._state
        is_preparing = state.phase is Phase.PREPARING and state.gang.order is None
        return is_preparing and state.newest_seen == state.attempt

    def _join(self, now: float) -> bool:
        """Continue the attempt that late orders have started. Return False if it cannot
        continue."""
        state = self._state
        finding = sort_members(state.roster.members.values(), state.attempt, state.attempt)
        if not finding.is_sound or any(map(_is_away, finding.running)):
            return False
        self._life.masters |= finding.masters
        state.ranks.reset(state.shape)
        self._restore_ranks(finding)
        return self._continues(finding, now)

    def _restore_ranks(self, finding: NewestAttempt) -> None:
        """Give every pod the rank that its agent reports."""
        told = [m for m in self._state.roster.members.values() if m.report and not m.condemned]
        # If two agents report one rank, the members that run, or stay, keep it: the others were let
        # go. Of those that stay, one that knows of a newer attempt got it later.
        for member in (*finding.running, *sorted(told, key=_claim)):
            if member.report is not None and member.report.rank is not None:
                self._state.ranks.restore(member, member.report.rank)

    def _adopt(self, now: float) -> None:
        state = self._state
        finding = sort_members(
            state.roster.members.values(), state.status.restart_count, self._stock_attempt()
        )
        state.attempt = finding.attempt
        state.buddies.is_whole = False
        incident = state.incidents.open
        if incident is not None and incident.attempt + 1 < finding.attempt:
            state.close_incident("failed again", now)
        self._life.masters |= finding.masters
        self._life.reshape(now)
        state.plan.adopt(now)
        if state.condition in (None, ConditionType.SUSPENDED):
            self._life.mark_created(now)
        self._restore_ranks(finding)
        ranked = [state.roster.members[uid] for uid in state.ranks.rank_of]
        state.plan.adopt_extra(ranked)
        if self._recovery.carry_on(finding.attempt, now):
            return
        if not self._continues(finding, now):
            self._restart(finding, now)
        if len(state.gang.completed) < state.nnodes:
            state.plan.create(now)
        self._recovery.judge(list(state.roster.members.values()), now)

    def _continues(self, finding: NewestAttempt, now: float) -> bool:
        """True if the attempt continues, or is prepared as it was."""
        state = self._state
        was_running = state.condition is ConditionType.RUNNING
        was_running = was_running and state.status.restart_count == finding.attempt
        if finding.is_untouched and not (was_running or self._has_begun(finding)):
            if self._was_ordered(finding):
                members = state.roster.members.values()
                unheard = (member.uid for member in members if _is_unheard(member))
                self._life.unheard.update(dict.fromkeys(unheard, finding.attempt))
            self._life.prepare(now)
            return True
        if not finding.is_sound:
            return False
        ranked = {m.uid: state.ranks.rank_of.get(m.uid) for m in finding.running}
        if None in ranked.values():
            return False
        if len(ranked) < state.nnodes:
            if was_running or self._is_someone_unheard():
                return False
            # Some run it, so every pod was proven clear of what came before.
            ready = [m for m in state.roster.members.values() if _is_idle(m)]
            if any(m.report and is_stock(m.report) for m in (*finding.running, *ready)):
                return False  # A ready agent may have run the attempt and been stopped.
            self._fill(finding, ready)
            able = ranked.keys() | {member.uid for member in ready}
            if not state.ranks.is_full or not state.ranks.rank_of.keys() <= able:
                return False
        self._resume(finding, now)
        return True

    def _was_ordered(self, finding: NewestAttempt) -> bool:
        """True if the status, the ledger or an incident says that the attempt was ordered to start.

        The incident may be closed: that of the attempt's own fault was lost then."""
        state = self._state
        incidents = [*state.closed_incidents(), state.incidents.open]
        led = [one for one in incidents if one is not None and one.attempt + 1 == finding.attempt]
        if not led:
            is_first = state.condition is ConditionType.CREATED and bool(state.ledger.nnodes)
            return is_first or state.condition is ConditionType.PODS_RUNNING
        return any(one.ready_at is not None for one in led)

    def _has_begun(self, finding: NewestAttempt) -> bool:
        """True if the open incident says that the attempt ran. If no agent runs it any more, the
        attempt has failed, and the incident of that failure was lost."""
        incident = self._state.incidents.open
        if incident is None or incident.attempt + 1 != finding.attempt:
            return False
        return incident.started_at is not None

    def _stock_attempt(self) -> int:
        """The attempt of agents that name none: the one that broke, unless the next one was started
        or all of them run."""
        state, incident = self._state, self._state.incidents.open
        count = state.status.restart_count
        # If a newer fault was charged, its incident was lost.
        is_newest = incident is not None and incident.attempt + 1 >= count
        if incident is not None and incident.ready_at is not None and is_newest:
            return count
        broken = count if incident is None else max(incident.attempt, count - 1)
        if state.is_incident_unwritten:
            broken = max(count - 1, 0)
        running = [m for m in state.roster.members.values() if m.state in _BEGUN]
        spec = state.spec
        is_whole = spec is not None and len(running) >= spec.nnodes
        return count if is_whole else broken

    def _is_someone_unheard(self) -> bool:
        """True if an agent that has not answered may run the very rank that seems to be free."""
        members = self._state.roster.members.values()
        return any(_is_unheard(member) and not member.is_dead for member in members)

    def _fill(self, finding: NewestAttempt, ready: list[Member]) -> None:
        """Give the free ranks to the pods that the earlier operator gave them to, where that can be
        derived: its orders may still be on their way."""
        state, ranks, running = self._state, self._state.ranks, finding.running
        addresses = {address for address, _ in finding.masters}
        for member in ready:
            if member.view.address in addresses:
                ranks.restore(member, 0)
        incident = state.incidents.open
        is_replaced = incident is not None and rung_of(incident.remedy).replaces is Pods.ALL
        is_first = state.attempt == 0 or is_replaced
        # If more pods are ready than there are ranks, some were perhaps not ready when ranks were
        # given.
        if is_first and len(running) + len(ready) <= state.nnodes:
            first = Ranks()
            first.reset(state.shape)
            first.fill([*running, *ready], state.roster)
            if all(first.rank_of.get(m.uid) == ranks.rank_of[m.uid] for m in running):
                for member in ready:
                    ranks.restore(member, first.rank_of.get(member.uid, -1))
        # A pod that was not even up has received no orders from any operator.
        told = [m for m in state.roster.members.values() if m.report or _is_unheard(m)]
        unranked = [m for m in told if m.uid not in ranks.rank_of]
        if len(unranked) == 1 == state.nnodes - len(ranks.rank_of):
            ranks.fill(unranked, state.roster)

    def _resume(self, finding: NewestAttempt, now: float) -> None:
        state = self._state
        old = (state.status.master_addr or "", as_port(state.status.master_port))
        is_same = state.status.restart_count == state.attempt
        order = self._life.train(now, next(iter(finding.masters), old), _lease_of(finding.running))
        done = [m.uid for m in finding.running if m.state is AgentState.COMPLETED]
        ranks = state.ranks.rank_of
        state.gang.resume(order, ranks, now, completed=done)
        if state.gang.stage is GangStage.RUNNING:
            is_told = is_same and state.condition is ConditionType.RUNNING
            is_told = is_told and state.incidents.open is None
            if not is_told:
                self._life.report_running(now)

    def _restart(self, finding: NewestAttempt, now: float) -> None:
        """Stop what is left of the attempt, note its progress, and name the culprit."""
        state = self._state
        found = []
        for member in finding.broken:
            assert member.report is not None
            if member.state is AgentState.FAULTED:
                found += symptoms.of_workers(member, member.report, now)
        if not found:
            text = f"a new operator did not find every rank running in attempt {finding.attempt}"
            found = [Symptom(now, OPERATOR_RESTARTED, text)]
        # The earlier operator may have written none of it, and agents that are stopped forget it.
        for member in (*finding.running, *finding.broken):
            if member.report is not None and member.report.watch:
                state.watched[member.uid] = member.report.watch
        state.enter(Phase.TRAINING)
        self._recovery.open(found, now)
