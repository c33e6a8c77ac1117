"""Reasons why a job that is to start has not started yet.

The cause is in the message of the job's newest condition, and in one event for each cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.core.job.record.redaction import clean
from unbroken.core.job.recovery.signals import as_reason
from unbroken.spec.job.types import Condition

from .deadlines import earliest
from .events import PodName, PodPhase, PodUid, PodView
from .obstacles import (
    AGENT_SHARED,
    MARK,
    NO_AGENT,
    NOT_PROVEN,
    REFUSED,
    Obstacle,
    printable,
    summary,
    with_wait,
)
from .roster import Member
from .state import JobState
from .transitions import Phase

EVENTS_MAX = 20
"""Events about causes, between two starts of the job."""
CHANGE_SECONDS = 2.0
"""Seconds between changes of the text: a thousand pods that recover one by one must not cause a
thousand writes."""
AGENT_SECONDS = 15.0
"""Seconds after which a running container whose agent never reported is shown."""


@dataclass(slots=True)
class Waits:
    """The obstacles of one job's pods."""

    state: JobState
    _recorded: set[str] = field(default_factory=set)
    """Causes with an event recorded since the last start."""
    _changed_at: float | None = None
    _due: float | None = None
    _up: dict[PodUid, float] = field(default_factory=dict)
    """Time since when each pod runs whose agent never reported."""
    _without_wait: tuple[Condition, ...] | None = None
    """Conditions that are known to mention no wait."""

    def deadline(self) -> float | None:
        """Return when the text is to change, or a missing agent is to be reported."""
        if self.state.phase is not Phase.PREPARING:
            return None
        first = next(iter(self._up.values()), None)
        return earliest(self._due, None if first is None else first + AGENT_SECONDS)

    def see(self, view: PodView, now: float) -> None:
        """Take the view of a pod whose agent never reported."""
        trouble = self.state.trouble
        if view.reason:
            self._up.pop(view.uid, None)
            self.note(Obstacle(view.name, view.reason, view.message, view.last_lines))
            return
        known = trouble.get(view.name)
        if known is not None and known.reason == NOT_PROVEN:
            return
        if known is not None and known.reason != NO_AGENT:
            del trouble[view.name]
        if view.phase is PodPhase.RUNNING and not view.is_deleting:
            self._up.setdefault(view.uid, now)

    def held(self, member: Member | None, reason: str, message: str) -> None:
        """Take what a node or a link says of a pod, unless more is known by now."""
        if member is None or member.report is not None:
            return
        view = member.view
        if reason == NOT_PROVEN and view.phase is PodPhase.RUNNING and not view.is_deleting:
            self._up.pop(view.uid, None)
            # The operator's link has recorded the event.
            self.state.trouble[view.name] = Obstacle(view.name, reason, printable(message))
        if reason == AGENT_SHARED:
            self._up.pop(view.uid, None)
            self.note(Obstacle(view.name, reason, printable(message)))
        if view.phase is PodPhase.PENDING and not view.reason and not view.is_deleting:
            self.note(Obstacle(view.name, as_reason(reason), printable(message)))

    def shared(self, view: PodView, other: PodView) -> None:
        """Note that the agent of another pod answers at the address of this one."""
        self._up.pop(view.uid, None)
        text = f"one agent answers at its port {view.agent_port} and at that of pod {other.name}"
        self.note(Obstacle(view.name, AGENT_SHARED, text))

    def refused(self, name: PodName, reason: str) -> None:
        """Note that a pod could not be created."""
        self.note(Obstacle(name, REFUSED, printable(f"it cannot be created: {reason}")))

    def forget(self, view: PodView) -> None:
        """Forget the pod: its agent has reported, or it is gone."""
        self._up.pop(view.uid, None)
        self.state.trouble.pop(view.name, None)

    def advance(self, now: float) -> None:
        """Write the reason of the wait into the condition."""
        state = self.state
        if state.phase is Phase.TRAINING:
            self._recorded.clear()
        is_waiting = state.phase is Phase.PREPARING
        if is_waiting:
            self._miss_agents(now)
        if not state.trouble and state.status.conditions is self._without_wait:
            return  # Nothing to report, the usual case: this runs after each report.
        text = summary(state.trouble.values()) if is_waiting else ""
        reason = next(iter(state.trouble.values())).cause if text else ""
        wanted = with_wait(state.status.conditions, clean(text), as_reason(reason))
        self._due = None
        if wanted == state.status.conditions:
            self._without_wait = None if text else state.status.conditions
            return
        is_change = text and any(MARK in one.message for one in state.status.conditions)
        due = (self._changed_at or 0.0) + CHANGE_SECONDS
        if is_change and now < due:
            self._due = due
            return
        self._changed_at = now
        state.set_status(conditions=wanted)

    def note(self, obstacle: Obstacle) -> None:
        """Keep the obstacle, and record an event if its cause is new."""
        state = self.state
        state.trouble[obstacle.pod] = obstacle
        if obstacle.cause not in self._recorded and len(self._recorded) < EVENTS_MAX:
            self._recorded.add(obstacle.cause)
            state.record_event(as_reason(obstacle.cause), obstacle.full_text(), is_warning=True)

    def _miss_agents(self, now: float) -> None:
        if not self._up:
            return
        for uid in [uid for uid, since in self._up.items() if now >= since + AGENT_SECONDS]:
            del self._up[uid]
            member = self.state.roster.members.get(uid)
            if member is not None and member.report is None:
                port = member.view.agent_port
                text = f"its container runs, and no agent has answered at its port {port} yet"
                self.note(Obstacle(member.view.name, NO_AGENT, text))
