"""Decide which spares import modules beforehand, as agents of the gang report them.

A spare has trained nothing: it does not know its workers' imports until it is ordered to import
them. No order is sent while the gang stops or starts. Each agent's report shows which modules it
lacks.
"""

from __future__ import annotations

from collections.abc import Iterable

from unbroken.wire.agent import WARM_PEERS_MAX, AgentReport, AgentState, WarmCommand

from .events import AskAgent, JobEffect
from .gang import GangStage
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
        return self._at if self._is_quiet() else None

    def note_imports(
        self, before: AgentReport | None, after: AgentReport, was_away: bool, now: float
    ) -> None:
        """Note that an agent has reported. One that is new does not wait for others."""
        old = None if before is None or was_away else (before.state, before.imports)
        if after.imports is not None and old != (after.state, after.imports) and self._at is None:
            self._at = now + (GATHER_SECONDS if before is not None else 0.0)

    def advance(self, now: float) -> list[JobEffect]:
        """Send the orders that are due, and repeat them until a report shows them."""
        if self._at is None or now < self._at or not self._is_quiet():
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

    def _is_quiet(self) -> bool:
        state = self._state
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
