"""The job's closed incidents and goodput, for the agent whose worker keeps a run of an experiment
tracker.

The agent's report has the version that it knows. It gets the history while that is not the present
one, so that a lost message, another operator and another agent need no rule of their own.
"""

from __future__ import annotations

from dataclasses import astuple
from zlib import crc32

from unbroken.core.job.events import AskAgent, JobEffect
from unbroken.core.job.recovery.incidents import writable
from unbroken.core.job.recovery.symptoms import describe
from unbroken.core.job.roster import Member
from unbroken.core.job.state import JobState
from unbroken.spec.job.codec import seconds_lost
from unbroken.spec.job.incident import Incident
from unbroken.wire.agent import HISTORY_MAX, PAST_CHARACTERS, HistoryCommand, PastIncident

from .timeline import goodput, lost_steps


class HistorySender:
    """Sends the history of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._asking: Member | None = None
        """The pod whose agent has asked, of node rank 0; None: none has."""
        self._is_due = False
        self._revision = -1
        """Revision of the incidents when the asking agent last had all."""

    def note(self, member: Member) -> None:
        """Take a report of an agent."""
        report = member.report
        is_first = self._state.gang.ranks.get(member.uid) == 0
        if is_first and report is not None and report.history is not None:
            self._asking, self._is_due = member, True

    def advance(self, now: float) -> list[JobEffect]:
        """Return the message to the agent that does not know the newest history."""
        member, state = self._asking, self._state
        if member is None or not (self._is_due or state.incidents.revision != self._revision):
            return []
        self._is_due, self._revision = False, state.incidents.revision
        report = member.report
        if member.lost_why or member.uid not in state.roster.members:
            return []
        if report is None or report.history is None:
            return []
        closed = state.incidents.closed
        past = tuple(_past(closed[number]) for number in sorted(closed)[-HISTORY_MAX:])
        # 0 is the version of an agent that has none.
        version = crc32(repr([astuple(incident) for incident in past]).encode()) | 1
        if not past or report.history == version:
            return []
        return [AskAgent(member.uid, self._command(version, past, now))]

    def _command(self, version: int, past: tuple[PastIncident, ...], now: float) -> HistoryCommand:
        state = self._state
        incidents = state.incidents
        kept = [*incidents.closed.values(), *([incidents.open] if incidents.open else [])]
        found = goodput(state.status, kept, state.ledger, now)
        return HistoryCommand(
            version, past, state.status.restart_count, sum(found.lost.values()), found.steps,
            found.share,
        )  # fmt: skip


def _past(incident: Incident) -> PastIncident:
    shown = writable(incident)
    return PastIncident(
        shown.number,
        shown.attempt,
        shown.fault[:PAST_CHARACTERS],
        describe(shown.culprit)[:PAST_CHARACTERS],
        shown.remedy.value,
        seconds_lost(shown),
        lost_steps(shown),
    )
