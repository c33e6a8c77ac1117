"""The faults that were really injected, against which the operator's decisions are checked."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from unbroken.core.job.events import NodeName, PodName, PodUid

USER_RESTART = "user_restart"
UNREACHED = "peers_unreached"


@dataclass(eq=False, slots=True)
class Fault:
    """Something that happened and that may end an attempt."""

    at: float
    kind: str
    uids: frozenset[PodUid]
    pods: frozenset[PodName]
    node: NodeName | None = None
    is_prompt: bool = False
    """The operator must know of it before the next attempt starts, whichever operator stops this
    one."""
    ends_pod: bool = False
    """Its pod ends, or workers that wait there for their rank; while no attempt runs that counts
    for every pod, ranked or not."""
    is_anyones: bool = False
    """True if it shows at other pods than its own, or at none."""
    until: float | None = None
    """Time at which it passes by itself and can no longer be known; None: it stays."""
    ended: int | None = None
    """The attempt that it ended."""


@dataclass(slots=True)
class Truth:
    """Facts that only the world knows."""

    faults: list[Fault] = field(default_factory=list)
    rank_of: dict[PodUid, tuple[int, int]] = field(default_factory=dict)
    """Node ranks that pods were last ordered to take, and the generation of that operator."""
    have_worked: set[PodUid] = field(default_factory=set)
    """Pods in which workers have started."""
    ended: dict[int, Fault | None] = field(default_factory=dict)
    """Attempts that were ended, and for what; None: by its user."""
    epochs: int = 0
    """Number of suspensions, and of times that numbers of lost attempts were used again."""
    wants_suspension: bool = False
    """The user's present wish."""
    suspended_at: float = -math.inf
    """Time of its newest suspension, which may have been taken back since."""
    is_suspended: bool = False
    """True if its user suspended it, or not yet resumed: stopping needs no other reason."""
    is_stock: bool = False
    """The agents know no attempts."""
    is_undisturbed: bool = True
    """No operator has crashed, and the job was never suspended: nothing was forgotten."""
    is_deleted: bool = False
    """The job object is being deleted."""
    is_forbidden: bool = False
    """The API has refused a pod for good."""
    stalled: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that stalled or were stopped, by attempt."""
    at_work: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that worked while no rank showed any activity, by attempt."""
    strikes: list[str] = field(default_factory=list)
    """Names of the faults and disturbances that have come so far."""
    has_leases: bool = False
    """Workers end by themselves if nothing reaches their agent."""
    is_clear: bool = True
    """Every message arrives, so that the cause is always known before its consequences."""

    def is_by_user(self, attempt: int) -> bool:
        """Return whether the attempt was stopped because its user suspended the job."""
        return attempt in self.ended and self.ended[attempt] is None

    def charged(self) -> int:
        """Attempts that a fault must have ended, and not a user."""
        asked = sum(fault.kind == USER_RESTART for fault in self.faults)
        return sum(fault is not None for fault in self.ended.values()) - asked

    def forget_requests(self, known: Container[float]) -> None:
        """Let requests to restart end one more attempt, but for those of the `known` times.

        The operator that followed them died before it had written so.
        """
        for fault in self.faults:
            if fault.kind == USER_RESTART and fault.ended is not None and fault.at not in known:
                fault.ended = None

    def end(self, attempt: int, *, is_begun: bool = True) -> bool:
        """Find what ended the attempt; False: nothing did.

        Prompt faults up to now are all spent on it; of those that may become known later, one is.
        """
        if attempt in self.ended:
            return True
        if self.is_suspended or self.is_deleted:
            self.ended[attempt] = None
            return True
        candidates = [
            fault
            for fault in self.faults
            if fault.ended is None
            and (
                fault.is_anyones
                or fault.uids & self.rank_of.keys()
                or (fault.ends_pod and not is_begun)
            )
        ]
        if not candidates:
            return False
        prompt = [fault for fault in candidates if fault.is_prompt]
        spent = prompt or candidates[:1]
        for fault in spent:
            fault.ended = attempt
        self.ended[attempt] = spent[0]
        return True
