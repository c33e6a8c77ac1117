"""When the workers of a silent agent have ended, because their lease has run out.

The agent's half, and how a lease is renewed, are in `core.agent.lease`. This operator renews the
lease of an agent that it hears; the operators before it had lost their mandate before it began.
Peers renew it only all together, so not after one of them was proven to run the attempt no longer,
and never in an attempt for which one of them has never vouched. So the workers have ended one lease
after both are over. Nothing is asked of the node for that.

A job of one node has no peers. Its agent cannot tell a cut network from an operator that is away,
and has no lease.
"""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.spec.job.types import FenceBy

from .events import PodUid
from .gang import GangStage
from .roster import Member
from .state import JobState

DRIFT = 0.01
"""By how much a clock may run fast or slow; NTP slews clocks by 0.05 % at most. Three count: the
agent's, the operator's, and those on which peers say how long ago something was."""
MARGIN_SECONDS = 1.5
"""For the agent to kill its workers, and for its keeper to do it 0.5 s later if it has not."""


class Leases:
    """The silent agents of a job whose workers are waited for."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._heard_at: dict[PodUid, float] = {}
        """When an agent that is lost now was last heard."""
        self._began_at = 0.0
        """When this operator began with the job: no other one has renewed a lease since."""
        self._alone: tuple[PodUid, float] | None = None
        """The only pod that is not proven clear, and since when."""

    def begin(self, now: float) -> None:
        """Note that this operator knows the job from now on."""
        self._began_at = now

    def lost(self, uid: PodUid, silent_seconds: float, now: float) -> None:
        """Note that the agent cannot be reached, and for how long it was silent by then."""
        self._heard_at[uid] = now - silent_seconds

    def heard(self, uid: PodUid) -> None:
        """Note that the agent is back, or its pod is gone."""
        self._heard_at.pop(uid, None)

    def deadline(self) -> float | None:
        """When the next lease has run out."""
        return min((due for _, due in self._due()), default=None)

    def over(self, now: float) -> list[Member]:
        """Return the pods whose workers have ended since, each once."""
        state = self._state
        self._find_alone(now)
        found = [member for member, due in self._due() if now >= due]
        for member in found:
            member.is_lease_over = True
            member.clear_through = max(member.clear_through, state.gang.fence)
        return found

    def _find_alone(self, now: float) -> None:
        unclear = self._state.gang.unclear
        last = next(iter(unclear)) if len(unclear) == 1 else None
        if last is None:
            self._alone = None
        elif self._alone is None or self._alone[0] != last:
            self._alone = (last, now)

    def _due(self) -> Iterator[tuple[Member, float]]:
        gang, members = self._state.gang, self._state.roster.members
        if gang.stage is not GangStage.HALTED or not (self._heard_at or self._alone):
            return
        alone = [] if self._alone is None else [self._alone[0]]
        for uid in {**self._heard_at, **dict.fromkeys(alone)}:
            member = members.get(uid)
            if uid not in gang.unclear or member is None or member.is_lease_over:
                continue
            if member.report is not None and uid not in self._heard_at:
                continue  # It can be asked.
            seconds, quiet_at = self._of_rank(member) or self._of_unknown(member) or (0.0, 0.0)
            if seconds:
                heard_at = self._heard_at.get(uid, self._began_at)
                length = seconds * (1 + 3 * DRIFT) + MARGIN_SECONDS
                yield member, max(heard_at, quiet_at) + length

    def _of_rank(self, member: Member) -> tuple[float, float] | None:
        """The length of the lease of a rank of the last attempt, and since when its peers renew it
        no more; None: it has no lease, or that is not known."""
        gang = self._state.gang
        if gang.order is None or member.uid not in gang.ranks or member.report is None:
            return None
        quiet = [at for uid, at in gang.witnesses.items() if uid != member.uid]
        if not gang.order.lease_seconds or not quiet:
            return None
        return (gang.order.lease_seconds, min(quiet))

    def _of_unknown(self, member: Member) -> tuple[float, float] | None:
        """The same of a pod of which this operator does not know what it was told. It is the only
        one that may run anything, so whichever peers it has renew nothing."""
        is_leased = self._state.options.fence_by is FenceBy.LEASE
        if not is_leased or self._alone is None or self._alone[0] != member.uid:
            return None
        reports = [one.report for one in self._state.roster.members.values()]
        lengths = [report.lease_seconds for report in reports if report is not None]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths) or max(known, default=0.0) == 0.0:
            return None
        return (max(known), self._alone[1])
