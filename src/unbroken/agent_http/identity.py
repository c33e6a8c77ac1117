"""Identity that an agent has to prove, and agents that offer no proof.

HyperPod's own agent has neither a link nor a key. It is served without a proof, unless the operator
requires one, or anything says that the job's agents are ours, which always prove. A program that
answers at a pod's address can therefore not pass for an agent of ours
(docs/design/agent-authentication.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.spec.keys import AGENT_AUTH

_OFFERS_NONE = "offers no proof of the job's key"


@dataclass(slots=True)
class Proofs:
    """What is known of the proofs of one job's agents."""

    is_required: bool = True
    """The operator serves no agent without a proof."""
    is_given: bool = False
    """An agent of the job has proven its key, now or before an earlier start."""
    is_served: bool = False
    """An agent of the job has been served without a proof."""

    def refusal(self, *, is_ours: bool) -> str | None:
        """Return why an agent that offers no proof is refused; None: it is served."""
        if is_ours:
            return (
                f"{_OFFERS_NONE}, but its pod runs unbroken's agent, which always proves: another "
                "program may answer at the pod's address"
            )
        if self.is_given:
            return (
                f"{_OFFERS_NONE}, but agents of this job have proven it: another program may "
                "answer at the pod's address. If the image has a new agent, create the job again"
            )
        if self.is_required:
            return (
                f"{_OFFERS_NONE}, as HyperPod's own agent does, and this operator requires one "
                f"(--agent-authentication required); to serve it, annotate the job {AGENT_AUTH}: "
                "none"
            )
        return None


@dataclass(frozen=True, slots=True)
class Identity:
    """The expected agent: the peer at its address has to prove this identity."""

    key: bytes
    """Key of its job."""
    uid: str | None
    """Uid of its pod; None: any pod of the job."""
    proofs: Proofs = field(default_factory=Proofs)
    """Proofs of the agents of its job."""
    is_ours: bool = True
    """Its pod certainly runs an agent that proves its identity."""

    @property
    def refusal(self) -> str | None:
        """Return why an agent that offers no proof is refused; None: it is served."""
        return self.proofs.refusal(is_ours=self.is_ours)
