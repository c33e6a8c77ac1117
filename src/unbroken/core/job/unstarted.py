"""Workers that do not wait for their rank: they have ended, or take too long.

With `--inprocess-restart` workers start before their rank is known, and wait for it at a barrier.
An agent of this project reports a worker that ends before that. HyperPod's agent reports one only
if all workers were at the barrier before; else it stays in INIT, as for workers that take long.
"""

from __future__ import annotations

from itertools import takewhile

from unbroken.spec.job.detectors import Detector, Mode
from unbroken.wire.agent import AgentReport, AgentState

from .deadlines import earliest
from .events import PodUid
from .obstacles import NOT_READY, Obstacle
from .recovery import signals
from .recovery.recovery import Recovery
from .roster import Member
from .state import JobState
from .transitions import Phase
from .waiting import Waits

TELL_SECONDS = 30.0
"""Seconds in INIT after which the wait for the workers of a pod is reported."""
READY_SECONDS = 600.0
"""Seconds in INIT after which the pod is replaced, at the cost of a restart.

A watched worker without any sign of life gets as long. Rules of the job about its start may give
the workers more time.
"""
WAITS = "not all of its workers wait for their rank; one has ended before, or they take long"


class Unstarted:
    """The workers of one job that have no rank yet."""

    def __init__(self, state: JobState, recovery: Recovery, waits: Waits) -> None:
        self._state = state
        self._recovery = recovery
        self._waits = waits
        self._since: dict[PodUid, tuple[float, str]] = {}
        """Time since when an agent process reports INIT, and its id; the longest first."""
        self._untold: dict[PodUid, float] = {}
        """Agents among them whose wait is not reported yet."""
        self._is_preparing = False

    def deadline(self) -> float | None:
        """Return when a wait is to be reported, or a pod to be replaced."""
        if self._state.phase is not Phase.PREPARING or not self._since:
            return None
        first, by = next(iter(self._since.values()))[0], self._seconds()
        untold = next(iter(self._untold.values()), None)
        return earliest(
            None if untold is None else untold + TELL_SECONDS,
            None if by is None else first + by,
        )

    def heard(self, member: Member, now: float) -> None:
        """Take an agent's report."""
        report, uid = member.report, member.uid
        waits = report.agent_id if report and report.state is AgentState.INIT else None
        known = self._since.get(uid)
        if known is not None and known[1] == waits:
            return
        self._forget(uid)
        self._waits.forget(member.view)
        if waits is not None:
            self._since[uid], self._untold[uid] = (now, waits), now

    def broke(self, member: Member, report: AgentReport, now: float) -> None:
        """Charge the fault of workers that ended before they had a rank.

        It joins the open incident, unless the agent has started other workers since.
        """
        state, incident = self._state, self._state.incidents.open
        if state.phase is not Phase.PREPARING or member.condemned:
            return
        if state.is_incident_unwritten and member.early_attempt < state.attempt:
            return  # An earlier operator has charged it, and this one has told the agent to stop.
        found = signals.of_unstarted(member, report, now)
        if incident is not None and member.early_attempt <= incident.attempt:
            self._recovery.fault(found, now)
        else:
            self._recovery.open(found, now)

    def advance(self, now: float) -> None:
        """Report the waits, and replace the pods whose workers took too long."""
        members, was_preparing = self._state.roster.members, self._is_preparing
        self._is_preparing = self._state.phase is Phase.PREPARING
        if not self._is_preparing:
            self._since.clear()
            self._untold.clear()
            return
        if not was_preparing:
            # An agent may have reported its state before a new operator prepares, and only once.
            for member in list(members.values()):
                if member.state is AgentState.INIT:
                    self.heard(member, now)
                elif member.broke_early and member.report is not None:
                    self.broke(member, member.report, now)
        untold = self._untold.items()
        for uid in [u for u, _ in takewhile(lambda one: now >= one[1] + TELL_SECONDS, untold)]:
            del self._untold[uid]
            if uid in members:
                self._waits.note(Obstacle(members[uid].view.name, NOT_READY, WAITS))
        self._replace(now)

    def _replace(self, now: float) -> None:
        by, since = self._seconds(), self._since.items()
        if by is None:
            return
        for uid in [u for u, _ in takewhile(lambda one: now >= one[1][0] + by, since)]:
            self._forget(uid)
            member = self._state.roster.members.get(uid)
            if member is not None and not member.condemned:
                self._recovery.never_ready(member, f"{WAITS} ({by:g} s)", now)

    def _forget(self, uid: PodUid) -> None:
        self._since.pop(uid, None)
        self._untold.pop(uid, None)

    def _seconds(self) -> float | None:
        """Return the time that workers have; None: no limit."""
        state = self._state
        if state.spec is None or state.options.detectors[Detector.SILENT] is not Mode.ACT:
            return None
        policy = state.spec.run_policy
        starts = [
            rule.expected_start_cut_off_in_seconds for rule in policy.log_monitoring_configuration
        ]
        given = [policy.startup_deadline_seconds, *starts]
        return max([READY_SECONDS, *(one for one in given if one is not None)])
