"""Pods whose agent never answers, of a job that has trained before.

Its image and its template work, so the node is to blame: it does not load the image, does not start
the container, or does not connect it. A first start waits instead, because any image may be slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from itertools import takewhile

from .deadlines import earliest
from .events import PodPhase, PodUid
from .recovery import signals
from .recovery.recovery import Recovery
from .roster import Member
from .state import JobState
from .transitions import Phase


class Stage(Enum):
    """Stage of a pod's start."""

    STARTS = "starts"
    """It has a node, which reports nothing: it may still load a large image."""
    IS_HELD = "is held"
    """The node or the container reports why it does not start."""
    RUNS = "runs"
    """Its container runs, and its agent does not answer."""


SECONDS = {Stage.STARTS: 3600.0, Stage.IS_HELD: 600.0, Stage.RUNS: 600.0}
"""Seconds that a pod may stay in a stage."""


class Unanswered:
    """The pods of one job that have a node and no agent yet."""

    def __init__(self, state: JobState, recovery: Recovery) -> None:
        self._state = state
        self._recovery = recovery
        self._since: dict[Stage, dict[PodUid, float]] = {stage: {} for stage in Stage}
        """Time since when each is in its stage; the longest first."""

    def deadline(self) -> float | None:
        """Return when the next pod is to be replaced."""
        if not self._is_on():
            return None
        first = ((stage, next(iter(since.values()), None)) for stage, since in self._since.items())
        return earliest(*(None if at is None else at + SECONDS[stage] for stage, at in first))

    def see(self, member: Member, now: float) -> None:
        """Take a pod as it is now."""
        view, uid = member.view, member.uid
        if member.report is not None or view.node is None or member.condemned:
            return
        stage = Stage.STARTS
        if view.phase is PodPhase.RUNNING:
            stage = Stage.RUNS
        elif view.name in self._state.trouble or uid in self._since[Stage.IS_HELD]:
            stage = Stage.IS_HELD  # The reason comes and goes with each try.
        if uid not in self._since[stage]:
            self.forget(uid)
            self._since[stage][uid] = now

    def forget(self, uid: PodUid) -> None:
        """Forget a pod that is gone, or whose agent has answered."""
        for since in self._since.values():
            since.pop(uid, None)

    def advance(self, now: float) -> None:
        """Replace the pods that have taken too long, elsewhere."""
        for stage, since in self._since.items() if self._is_on() else ():
            begun_by = now - SECONDS[stage]
            for uid in list(takewhile(partial(_began_by, since, begun_by), since)):
                del since[uid]
                member = self._state.roster.members.get(uid)
                if member is None or member.condemned or member.view.node is None:
                    continue
                if self._has_peer(member):
                    self._replace(member, stage, now)
                else:
                    since[uid] = now  # The spec may have changed: its image may never have worked.

    def _replace(self, member: Member, stage: Stage, now: float) -> None:
        assert member.view.node is not None
        self._state.plan.avoid |= {member.view.node}
        text = f"its agent has not answered within {SECONDS[stage] // 60:g} minutes"
        self._recovery.lose_all([member], signals.NOT_READY, text, now)

    def _is_on(self) -> bool:
        state = self._state
        return state.has_run and state.phase in (Phase.PREPARING, Phase.TRAINING)

    def _has_peer(self, member: Member) -> bool:
        """True if an agent of another pod of the same replica spec has answered."""
        kind = member.view.replica_spec
        members = self._state.roster.members.values()
        return any(one.report is not None and one.view.replica_spec == kind for one in members)


def _began_by(since: Mapping[PodUid, float], time: float, uid: PodUid) -> bool:
    return since[uid] <= time
