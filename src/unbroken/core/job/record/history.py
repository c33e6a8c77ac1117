"""The job's closed incidents and goodput, for the agent whose worker keeps a run of an experiment
tracker.

The agent's report has the version that it knows. It gets the history while that is not the present
one, so that a lost message, another operator and another agent need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Revision of the incidents that were looked at last."""
        self._version = 0
        self._past: tuple[PastIncident, ...] = ()
        self._shown: dict[int, tuple[Incident, PastIncident]] = {}
        """Each incident with its short form, kept because removing secrets takes long."""

    def note(self, member: Member) -> None:
        """Take a report of an agent."""
        report = member.report
        is_first = self._state.gang.ranks.get(member.uid) == 0
        if is_first and report is not None and report.history is not None:
            self._asking, self._is_due = member, True

    def advance(self, now: float) -> list[JobEffect]:
        """Return the message to the agent that does not know the newest history."""
        member, state = self._asking, self._state
        has_changed = state.incidents.revision != self._revision
        if member is None or not (self._is_due or has_changed):
            return []
        self._is_due, self._revision = False, state.incidents.revision
        if has_changed:
            self._look(state.incidents.closed)
        report = member.report
        if member.lost_why or member.uid not in state.roster.members:
            return []
        known = None if report is None else report.history
        if known in (None, self._version) or not self._past:
            return []
        return [AskAgent(member.uid, self._command(now))]

    def _look(self, closed: Mapping[int, Incident]) -> None:
        """Take the newest incidents; those that have not changed are not read again."""
        before, self._shown = self._shown, {}
        for number in sorted(closed)[-HISTORY_MAX:]:
            incident, known = closed[number], before.get(number)
            if known is None or known[0] is not incident:
                known = incident, _past(incident)
            self._shown[number] = known
        self._past = tuple(past for _, past in self._shown.values())
        # 0 is the version of an agent that has none.
        self._version = crc32(repr(self._past).encode()) | 1

    def _command(self, now: float) -> HistoryCommand:
        state = self._state
        found = goodput(state.status, state.incidents.kept, state.ledger, now)
        return HistoryCommand(
            self._version,
            self._past,
            state.status.restart_count,
            sum(found.lost.values()),
            found.steps,
            found.share,
        )


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
