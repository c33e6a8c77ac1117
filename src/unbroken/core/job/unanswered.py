"""Pods whose agent never answers, of a job that has trained before.

Its image and its template work, so the node is to blame: it does not start the container, or does
not connect it. A first start waits instead, because any image may be slow.
"""

from __future__ import annotations

from itertools import takewhile

from .events import PodUid
from .recovery import signals
from .recovery.recovery import Recovery
from .roster import Member
from .state import JobState
from .transitions import Phase

ANSWER_SECONDS = 600.0
"""Seconds from a pod's node being known to the first report of its agent. An image of 20 GB is
loaded meanwhile at 40 MB/s."""


class Unanswered:
    """The pods of one job that have a node and no agent yet."""

    def __init__(self, state: JobState, recovery: Recovery) -> None:
        self._state = state
        self._recovery = recovery
        self._since: dict[PodUid, float] = {}
        """Time since when each has a node; the longest first."""

    def deadline(self) -> float | None:
        """Return when the next pod is to be replaced."""
        first = next(iter(self._since.values()), None) if self._is_on() else None
        return None if first is None else first + ANSWER_SECONDS

    def see(self, member: Member, now: float) -> None:
        """Take a pod as it is now."""
        if member.report is None and member.view.node is not None and not member.condemned:
            self._since.setdefault(member.uid, now)

    def forget(self, uid: PodUid) -> None:
        """Forget a pod that is gone, or whose agent has answered."""
        self._since.pop(uid, None)

    def advance(self, now: float) -> None:
        """Replace the pods that have taken too long, elsewhere."""
        if not self._is_on():
            return
        state = self._state
        late = takewhile(lambda one: now >= one[1] + ANSWER_SECONDS, self._since.items())
        for uid in [uid for uid, _ in late]:
            del self._since[uid]
            member = state.roster.members.get(uid)
            if member is None or member.condemned or member.view.node is None:
                continue
            if not self._has_peer(member):
                self._since[uid] = now  # The spec may have changed: its image is not known to work.
                continue
            state.plan.avoid |= {member.view.node}
            text = f"its agent has not answered within {ANSWER_SECONDS:g} s"
            self._recovery.lose_all([member], signals.NOT_READY, text, now)

    def _is_on(self) -> bool:
        state = self._state
        return state.has_run and state.phase in (Phase.PREPARING, Phase.TRAINING)

    def _has_peer(self, member: Member) -> bool:
        """True if an agent of another pod of the same replica spec has answered."""
        kind = member.view.replica_spec
        members = self._state.roster.members.values()
        return any(one.report is not None and one.view.replica_spec == kind for one in members)
