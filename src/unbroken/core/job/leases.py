"""Expiry of worker leases: when the workers of a silent agent are known to have ended.

The agent's half, and how a lease is renewed, are in `core.agent.machine`. This operator renews the
lease of an agent that reaches it. Earlier operators had lost their mandate before this one began.

Peers renew a lease only all together. They stop once one peer is proven to run the attempt no
longer, and they never renew in an attempt for which some peer has never vouched. So the workers
have ended one lease after the renewals by operator and peers have both stopped. The node is not
asked.

A job of one node has no peers. Its agent cannot distinguish a cut network from an absent operator,
and has no lease.

A new operator may never hear the agent of a pod, and so does not know what the pod was ordered to
run. Whatever it is, all ranks of that attempt together renew it. While fewer agents are silent than
the attempt has nodes, some of its ranks run nothing, and nobody renews it. The ledger contains the
lease and the number of nodes from before the first start. If it has neither, nothing was started.
"""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.spec.job.types import FenceBy

from .events import PodUid
from .gang import GangStage
from .roster import UNHEARD, Member
from .state import JobState

DRIFT = 0.01
"""Fraction by which a clock may run fast or slow; NTP slews clocks by 0.05 % at most.

Three clocks count: the agent's, the operator's, and those by which peers report ages.
"""
MARGIN_SECONDS = 1.5
"""Seconds for the agent to kill its workers, and for its keeper to do so 0.5 s later if the agent
has not."""

DELETION_SECONDS = 10.0
"""Seconds after which a pod on a node that is not ready is taken for one that the node cannot
end."""
STUCK_SECONDS = 600.0
"""The same on a node that is ready, for a pod whose agent never answered; longer than most grace
periods."""


class Leases:
    """The silent agents of a job whose workers have yet to end."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._last_report_at: dict[PodUid, float] = {}
        """Time of the last message of each agent that is lost now."""
        self._unheard: dict[PodUid, None] = {}
        """Pods that may run anything, and whose agent has never reported."""
        self._began_at = 0.0
        """Time at which this operator took over the job; no other operator has renewed a lease
        since."""
        self._few_since: float | None = None
        """Time since when fewer agents are silent than an attempt has nodes; None: they may be
        enough to renew one."""

    def begin(self, now: float) -> None:
        """Note that this operator knows the job from now on."""
        self._began_at = now

    def seen(self, member: Member) -> None:
        """Take a pod as it is now."""
        if member.report is None and member.clear_through == UNHEARD:
            self._unheard[member.uid] = None

    def lost(self, uid: PodUid, silent_seconds: float, now: float) -> None:
        """Note that the agent cannot be reached, and for how long it was silent by then."""
        self._last_report_at[uid] = now - silent_seconds

    def answered(self, uid: PodUid) -> None:
        """Note that the agent is back, or its pod is gone."""
        self._last_report_at.pop(uid, None)
        self._unheard.pop(uid, None)

    def deadline(self) -> float | None:
        """Return when the next lease runs out."""
        return min((due for _, due in self._due()), default=None)

    def free_names(self, now: float) -> None:
        """Let the next deletion of pods be forced that run nothing and are out of reach.

        Their nodes cannot end them, so each would keep its name until a person acts. A node that is
        reported as fenced is read again instead (`PodPlan.prove`).
        """
        state, is_leased = self._state, self._state.options.fence_by is FenceBy.LEASE
        for member in state.plan.condemned.values() if is_leased else ():
            is_away = state.roster.is_out_of_reach(member)
            # A node may be ready, and still unable to end a pod that it could not start.
            seconds = DELETION_SECONDS if is_away else STUCK_SECONDS
            is_late = now >= member.condemned_at + seconds and (is_away or member.report is None)
            if is_late and state.gang.is_empty(member):
                member.is_lease_over |= not state.roster.is_on_fenced(member)

    def over(self, now: float) -> list[Member]:
        """Return the pods whose workers have ended since the last call, each pod once."""
        state = self._state
        self._count_silent(now)
        found = [member for member, due in self._due() if now >= due]
        for member in found:
            member.is_lease_over = True
            member.clear_through = max(member.clear_through, state.gang.fence)
        return found

    def _count_silent(self, now: float) -> None:
        state = self._state
        is_few = False
        if state.gang.stage is GangStage.HALTED and state.newest_seen <= state.gang.fence:
            unclear = state.gang.unclear
            # A set of thousands would be made for each report.
            silent = len(unclear) + sum(uid not in unclear for uid in self._last_report_at)
            is_few = silent > 0 and (silent < self._nnodes() or self._is_untouched())
        if not is_few:
            self._few_since = None
        elif self._few_since is None:
            self._few_since = now

    def _nnodes(self) -> int:
        """Return the number of nodes of the newest attempt, as far as it is known. A lease means
        that there are at least two."""
        return max(2, self._state.ledger.nnodes)

    def _is_untouched(self) -> bool:
        """True if no operator has ordered a start: it is written before."""
        state = self._state
        return not state.ledger.nnodes and state.status.master_addr is None

    def _due(self) -> Iterator[tuple[Member, float]]:
        gang, members = self._state.gang, self._state.roster.members
        if gang.stage is not GangStage.HALTED:
            return
        unheard = self._unheard if self._few_since is not None else ()
        for uid in {**self._last_report_at, **dict.fromkeys(unheard)}:
            member = members.get(uid)
            if uid not in gang.unclear or member is None or member.is_lease_over:
                continue
            if member.report is not None and uid not in self._last_report_at:
                continue  # The agent can be asked.
            seconds, quiet_at = self._of_rank(member) or self._of_unknown() or (0.0, 0.0)
            if seconds:
                heard_at = self._last_report_at.get(uid, self._began_at)
                length = seconds * (1 + 3 * DRIFT) + MARGIN_SECONDS
                yield member, max(heard_at, quiet_at) + length

    def _of_rank(self, member: Member) -> tuple[float, float] | None:
        """Return the lease length of a rank of the last attempt, and when its peers ceased to renew
        it.

        None: the rank has no lease, or that is not known.
        """
        gang = self._state.gang
        if gang.order is None or member.uid not in gang.ranks or member.report is None:
            return None
        quiet = [at for uid, at in gang.witnesses.items() if uid != member.uid]
        if not gang.order.lease_seconds or not quiet:
            return None
        return (gang.order.lease_seconds, min(quiet))

    def _of_unknown(self) -> tuple[float, float] | None:
        """Return the same for a pod whose orders this operator does not know."""
        length = self._unknown_length()
        is_leased = self._state.options.fence_by is FenceBy.LEASE
        if self._few_since is None or not is_leased or not length:
            return None
        return (length, self._few_since)

    def _unknown_length(self) -> float:
        """Return the length of the lease of workers that an earlier operator has started; 0: they
        may have none.

        They have one if the ledger says so, or if all agents know leases. Those of one replica spec
        have the same template.
        """
        state, members = self._state, self._state.roster.members.values()
        if self._is_untouched():
            # Nothing runs. An earlier version of the operator could end before it wrote of a start.
            return state.options.lease_seconds
        heard = [one for one in members if one.report is not None]
        lengths = [one.report.lease_seconds for one in heard if one.report is not None]
        known = [length for length in lengths if length is not None]
        unheard = {one.view.replica_spec for one in members} - {o.view.replica_spec for o in heard}
        if len(known) < len(lengths) or (unheard and not state.ledger.lease_seconds):
            return 0.0
        return max([*known, state.ledger.lease_seconds])
