"""What was really done to the job, against which the operator's decisions are judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.core.events import NodeName, PodName, PodUid


@dataclass(eq=False, slots=True)
class Fault:
    """Something that happened and that may end an attempt."""

    at: float
    kind: str
    uids: frozenset[PodUid]
    pods: frozenset[PodName]
    node: NodeName | None = None
    is_prompt: bool = False
    """Whoever stops the attempt after it must have been told of it before the next one starts."""
    ends_pod: bool = False
    """Its pod ends; while no attempt runs that counts for every pod, ranked or not."""
    is_anyones: bool = False
    """It shows at other pods than its own, or at none."""
    ended: int | None = None
    """The attempt that it ended."""


@dataclass(slots=True)
class Truth:
    """Facts that only the world knows."""

    faults: list[Fault] = field(default_factory=list)
    rank_of: dict[PodUid, int] = field(default_factory=dict)
    """Node ranks that pods were ever ordered to take."""
    ended: dict[int, Fault | None] = field(default_factory=dict)
    """Attempts that were ended, and for what; None: by its user."""
    epochs: int = 0
    """How often the job was suspended."""
    is_suspended: bool = False
    """By its user: stopping needs no other reason."""
    is_undisturbed: bool = True
    """No operator has crashed, and nobody has suspended the job: nothing was forgotten."""
    is_clear: bool = True
    """Every message arrives, so that the cause is always known before its consequences."""

    def is_by_user(self, attempt: int) -> bool:
        """Whether the attempt was stopped because its user suspended the job."""
        return attempt in self.ended and self.ended[attempt] is None

    def end(self, attempt: int, *, is_begun: bool = True) -> bool:
        """Find what ended the attempt; False: nothing did.

        Prompt faults up to now are all spent on it; of those that may become known later, one is.
        """
        if attempt in self.ended:
            return True
        if self.is_suspended:
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
