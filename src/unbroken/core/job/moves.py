"""Planned moves, and the spares that wait for them: a job leaves a node that has a notice before
the node goes.

A pod on another node is made first, and waits until it is as warm as the others. The ranks then
change places in one restart, which is recorded as an incident of class PlannedMove and charges no
budget. Without snapshots it waits for the next checkpoint. The old pods stay until the job trains
again: their agents may have the newest snapshots.

Where no place is found the job trains on, until shortly before the deadline of the notice. It is
then stopped, so that workers can save their state, and waits for a place. A job that does not train
leaves a node that somebody waits for at the deadline, and one without planned moves at once.

`Spares` decides which spares import modules beforehand, as agents of the gang report them. A spare
has trained nothing: it does not know its workers' imports until it is ordered to import them. No
order is sent while the gang stops or starts. Each agent's report shows which modules it lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from unbroken.spec.job.incident import PLANNED_MOVE, Symptom
from unbroken.spec.job.types import Switch
from unbroken.wire.agent import WARM_PEERS_MAX, AgentReport, AgentState, WarmCommand

from .deadlines import earliest
from .events import AskAgent, JobEffect, NodeName
from .gang import GangStage
from .recovery.recovery import Recovery
from .roster import Member, address_of
from .state import JobState
from .transitions import Phase

GATHER_SECONDS = 1.0
"""Seconds to wait for all agents of a gang, which learn their imports at about the same time."""
REPEAT_SECONDS = 10.0


class Spares:
    """The spares of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._at: float | None = None
        """Time to look for spares that lack imports; None: none did when last looked."""

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        return self._at if _is_running(self._state) else None

    def note_imports(
        self, before: AgentReport | None, after: AgentReport, was_away: bool, now: float
    ) -> None:
        """Note that an agent has reported. One that is new does not wait for others."""
        old = None if before is None or was_away else (before.state, before.imports)
        if after.imports is not None and old != (after.state, after.imports) and self._at is None:
            self._at = now + (GATHER_SECONDS if before is not None else 0.0)

    def advance(self, now: float) -> list[JobEffect]:
        """Send the orders that are due, and repeat them until a report shows them."""
        if self._at is None or now < self._at or not _is_running(self._state):
            return []
        self._at = None
        members, ranks = self._state.roster.members, self._state.gang.ranks
        if len(members) <= len(ranks):
            return []
        teachers = _best(m for uid, m in members.items() if uid in ranks and _knows(m))
        most = _known(teachers[0]) if teachers else 0
        command = WarmCommand(tuple(map(address_of, teachers)))
        idle = [m for uid, m in members.items() if uid not in ranks and _is_idle(m)]
        found: list[JobEffect] = [AskAgent(m.uid, command) for m in idle if _known(m) < most]
        if found:
            self._at = now + REPEAT_SECONDS
        return found

    def is_warm(self, member: Member) -> bool:
        """True if a waiting pod has imported as much as any rank's.

        True for a pod whose agent starts no workers warm. False for any other pod until the ranks
        know their imports.
        """
        report = member.report
        if report is None or report.imports is None:
            return True
        ranks = self._state.gang.ranks
        known = (_known(m) for uid, m in self._state.roster.members.items() if uid in ranks)
        return 0 < max(known, default=0) <= _known(member)


def _is_running(state: JobState) -> bool:
    """True if the job trains, and all agents have said that their workers run."""
    return state.phase is Phase.TRAINING and state.gang.stage is GangStage.RUNNING


def _best(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=_known, reverse=True)[:WARM_PEERS_MAX]


def _knows(member: Member) -> bool:
    return not member.lost_why and bool(address_of(member)) and _known(member) > 0


def _known(member: Member) -> int:
    return (member.report.imports or 0) if member.report else 0


def _is_idle(member: Member) -> bool:
    report = member.report
    is_there = not (member.lost_why or member.condemned or member.view.is_deleting)
    is_ready = report is not None and report.state is AgentState.READY
    return is_there and is_ready and report is not None and report.imports is not None


LOOK_SECONDS = 1.0
"""Seconds between two looks at a move that waits."""
WARM_SECONDS = 30.0
"""A pod that is ready and not as warm as the others is waited for no longer."""
CHECKPOINT_SECONDS = 1800.0
"""The longest wait for the next checkpoint."""
LAST_SECONDS = 20.0
"""Seconds from the stop without a free place to the deadline: agents give workers 15 s to end."""
STALE_SECONDS = 300.0
"""A node that is still there so long after its deadline has none."""


class _Leaving(NamedTuple):
    """A rank on a node that has a notice."""

    member: Member
    why: str
    deadline: float | None


class Moves:
    """The planned moves of one job."""

    def __init__(self, state: JobState, recovery: Recovery, spares: Spares) -> None:
        self._state = state
        self._recovery = recovery
        self._spares = spares
        self._seen: dict[NodeName, float] = {}
        """Time at which each node with a notice was first seen with it."""
        self._is_settled = False
        """Nothing is left to be done for notices that there were."""
        self._ready_at: float | None = None
        """Time since which every rank that must leave has a pod to go to."""
        self._checkpoint: int | None = None
        """The newest checkpoint at that time."""
        self._look_at: float | None = None

    def deadline(self) -> float | None:
        """Return when to look again; None: no rank has to leave."""
        roster = self._state.roster
        limits = (
            limit
            for name, limit in self._limits()
            if name not in roster.expired and roster.on_node(name)
        )
        return earliest(self._look_at if self._is_quiet() else None, *limits)

    def advance(self, now: float) -> None:
        """Prepare and make the moves that notices ask for."""
        noticed = self._state.roster.noticed
        for name in self._seen.keys() - noticed.keys():
            del self._seen[name]
        for name in noticed:
            self._seen.setdefault(name, now)
        self._state.roster.closing = {name for name in noticed if self._is_closing(name, now)}
        self._expire(now)
        is_early = self._look_at is not None and now < self._look_at
        if is_early or not self._is_quiet():
            return
        affected = self._affected()
        if not affected and self._is_settled:
            self._look_at = None
            return
        ranks = self._state.gang.ranks
        leaving = [self._leaving(one) for one in affected if one.uid in ranks]
        self._is_settled = not affected
        self._look_at = None if not affected else now + LOOK_SECONDS
        self._make_room(leaving, now)
        why = "its node has a notice, and it trains nothing"
        self._let_go([one for one in affected if one.uid not in ranks], why, now)
        if leaving:
            self._advance(leaving, now)
        else:
            self._ready_at = None

    def _expire(self, now: float) -> None:
        """Have no pod left on the nodes that were waited for long enough."""
        roster, before = self._state.roster, self._state.roster.expired
        roster.expired = {name for name, limit in self._limits() if now >= limit}
        for name in sorted(roster.expired - before):
            self._recovery.judge(roster.on_node(name), now)

    def _limits(self) -> Iterator[tuple[NodeName, float]]:
        """Yield the nodes that somebody waits for, and until when pods may be there."""
        is_off = self._state.options.planned_moves is Switch.OFF
        for name, notice in self._state.roster.noticed.items():
            if notice.is_order:
                limit = self._seen[name] if is_off else self._deadline_of(name)
                if limit is not None:
                    yield name, limit

    def _is_quiet(self) -> bool:
        """True if the job trains, and has recovered from its last incident."""
        return _is_running(self._state) and self._state.incidents.open is None

    def _affected(self) -> list[Member]:
        """Return the pods on nodes that have a notice."""
        state = self._state
        if state.options.planned_moves is Switch.OFF:
            return []
        found = [member for name in state.roster.noticed for member in state.roster.on_node(name)]
        return [one for one in found if not one.condemned and one.uid not in state.gang.completed]

    def _leaving(self, member: Member) -> _Leaving:
        assert member.view.node is not None
        notice = self._state.roster.noticed[member.view.node]
        return _Leaving(
            member, f"{notice.name}: {notice.text}", self._deadline_of(member.view.node)
        )

    def _deadline_of(self, name: NodeName) -> float | None:
        """Return when the node goes; None: nobody knows."""
        notice = self._state.roster.noticed[name]
        return notice.deadline if notice.seconds is None else self._seen[name] + notice.seconds

    def _is_closing(self, name: NodeName, now: float) -> bool:
        """True if ranks must be stopped on the node, even without another place."""
        if self._state.options.planned_moves is Switch.OFF:
            return False
        last = _last_moment(self._deadline_of(name), now)
        return last is not None and now >= last

    def _make_room(self, leaving: Sequence[_Leaving], now: float) -> None:
        """Want a pod for each rank that leaves, in addition to the spares if these are too few."""
        state = self._state
        needed = Counter(one.member.view.replica_spec for one in leaving)
        for spec in state.shape:
            beside = max(spec.spares, needed[spec.name] if state.may_add_pods else 0)
            pods = spec.replicas + beside
            surplus = state.plan.resize(spec.name, pods, state.gang.ranks)
            self._let_go(surplus, "it is needed no more", now)
        state.plan.create(now)

    def _let_go(self, members: Iterable[Member], why: str, now: float) -> None:
        for member in members:
            self._state.plan.condemn(member, why, now)

    def _advance(self, leaving: Sequence[_Leaving], now: float) -> None:
        """Move the ranks once that costs least, or once it must be."""
        places = self._places()
        pairs = _paired(leaving, places)
        closing = self._state.roster.closing
        forced = [one for one in leaving if one.member.view.node in closing]
        if forced:
            self._move(forced, _paired(forced, places), now)
            return
        last = earliest(*(_last_moment(one.deadline, now) for one in leaving))
        self._look_at = earliest(self._look_at, last)
        if len(pairs) < len(leaving):
            self._ready_at = None
            return
        if self._ready_at is None:
            self._ready_at, self._checkpoint = now, self._newest_checkpoint()
        is_warm = all(self._spares.is_warm(new) for _, new in pairs)
        is_warm |= now >= self._ready_at + WARM_SECONDS
        if is_warm and self._is_saved(now - self._ready_at):
            self._move(leaving, pairs, now)

    def _places(self) -> list[Member]:
        """Return the pods that wait, ready to train, on nodes that stay."""
        state = self._state
        waiting = (m for uid, m in state.roster.members.items() if uid not in state.gang.ranks)
        nodes = state.roster.nodes
        return [
            member
            for member in waiting
            if state.gang.is_ready(member)
            and member.view.node is not None
            and (node := nodes.get(member.view.node)) is not None
            and node.is_usable
        ]

    def _is_saved(self, waited: float) -> bool:
        """True if a restart now costs no more than later."""
        state = self._state
        ranked = (state.roster.members.get(uid) for uid in state.gang.ranks)
        reports = [one.report for one in ranked if one is not None and one.report is not None]
        if any(report.copies or report.receipts for report in reports):
            return True  # They save each step in memory.
        newest = self._newest_checkpoint()
        if newest is None or waited >= CHECKPOINT_SECONDS:
            return True
        return newest > (self._checkpoint if self._checkpoint is not None else -1)

    def _newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint that every rank with checkpoints has
        reported."""
        told = (rank.checkpoint_step for watch in self._state.watched.values() for rank in watch)
        return min((step for step in told if step is not None), default=None)

    def _move(
        self, leaving: Sequence[_Leaving], pairs: Sequence[tuple[Member, Member]], now: float
    ) -> None:
        """Stop the attempt, and give the ranks to the pods on other nodes."""
        state = self._state
        goes_to = {old.uid: new for old, new in pairs}
        found = []
        for one in leaving:
            old, new = one.member, goes_to.get(one.member.uid)
            where = "no other place is free" if new is None else f"to node {new.view.node}"
            text = f"{one.why}; {where}"
            pod, node = old.view.name, old.view.node or ""
            found.append(Symptom(now, PLANNED_MOVE, text, pod=pod, node=node))
        self._ready_at, self._is_settled = None, False
        self._look_at = now  # once the job trains again
        self._recovery.fault(found, now)
        for one in leaving:
            state.ranks.release(one.member.uid)
            if one.member.uid not in goes_to:
                if state.may_add_pods:
                    state.plan.unwant(one.member)  # the pod that was made for it takes its place
                self._let_go([one.member], one.why, now)
                state.gang.forget(one.member.uid)
        state.ranks.fill([new for _, new in pairs], state.roster)


def _paired(leaving: Sequence[_Leaving], places: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Give each rank that leaves a pod of its replica spec, as far as there are any; those with the
    earliest deadline first."""
    free = list(places)
    found = []
    for one in sorted(leaving, key=lambda one: (one.deadline is None, one.deadline or 0.0)):
        wanted = one.member.view.replica_spec
        new = next((place for place in free if place.view.replica_spec == wanted), None)
        if new is not None:
            free.remove(new)
            found.append((one.member, new))
    return found


def _last_moment(deadline: float | None, now: float) -> float | None:
    """Return until when a rank may stay on a node that goes at `deadline`; None: for ever."""
    if deadline is None or now > deadline + STALE_SECONDS:
        return None
    return deadline - LAST_SECONDS
