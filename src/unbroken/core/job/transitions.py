"""The phases of a job, and every legal change from one to the next.

`JobState.enter` is the only place that changes a job's phase; it refuses changes missing from this
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The phase of a job's life."""

    UNKNOWN = "Unknown"
    """The operator does not know yet which pods and agents exist."""
    ADOPTING = "Adopting"
    """Agents that may run something are being asked."""
    PREPARING = "Preparing"
    """Nothing runs; pods, agents and ranks of the next attempt are brought together."""
    TRAINING = "Training"
    """An attempt starts or runs."""
    ENDING = "Ending"
    """Running workers are being stopped, for good or for a suspension."""
    SUSPENDED = "Suspended"
    ENDED = "Ended"
    DELETED = "Deleted"
    """The object is being deleted, with everything that belongs to it; nothing is ordered any
    more."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A legal change of phase. `cause` completes the sentence "the phase changes when ..."."""

    before: Phase
    after: Phase
    cause: str


TRANSITIONS = (
    Transition(Phase.UNKNOWN, Phase.PREPARING, "nothing of the job exists"),
    Transition(Phase.UNKNOWN, Phase.ADOPTING, "pods of the job exist"),
    Transition(Phase.UNKNOWN, Phase.ENDING, "the job is suspended"),
    Transition(Phase.UNKNOWN, Phase.ENDED, "the status says so, or no replica is wanted"),
    Transition(Phase.ADOPTING, Phase.TRAINING, "an attempt runs, or its last workers are stopped"),
    Transition(Phase.ADOPTING, Phase.PREPARING, "no attempt was started"),
    Transition(Phase.ADOPTING, Phase.ENDING, "the job is suspended, or had failed"),
    Transition(Phase.PREPARING, Phase.PREPARING, "a pod fails before the start"),
    Transition(Phase.PREPARING, Phase.TRAINING, "every rank has a pod that is ready"),
    Transition(Phase.PREPARING, Phase.ENDING, "a limit is reached, or the job is suspended"),
    Transition(Phase.TRAINING, Phase.PREPARING, "a fault is found, or a restart is requested"),
    Transition(Phase.TRAINING, Phase.ENDING, "a limit is reached, or the job is suspended"),
    Transition(Phase.TRAINING, Phase.ENDED, "every rank has completed"),
    Transition(Phase.ENDING, Phase.ENDING, "another reason to end comes"),
    Transition(Phase.ENDING, Phase.SUSPENDED, "nothing runs any more, and the job may resume"),
    Transition(Phase.ENDING, Phase.ENDED, "nothing runs any more"),
    Transition(Phase.SUSPENDED, Phase.PREPARING, "the job is resumed, and its old pods are gone"),
    Transition(Phase.SUSPENDED, Phase.ENDED, "the job is resumed, and no replica is wanted"),
    *(
        Transition(phase, Phase.DELETED, "the object is deleted")
        for phase in Phase
        if phase is not Phase.DELETED
    ),
)
_LEGAL = frozenset((transition.before, transition.after) for transition in TRANSITIONS)


class IllegalTransitionError(AssertionError):
    """The machine attempted a change of phase that is not in the table: a defect of its own."""


def check(before: Phase, after: Phase) -> None:
    """Raise IllegalTransitionError unless the table has this change."""
    if (before, after) not in _LEGAL:
        raise IllegalTransitionError(f"a job cannot go from {before.value} to {after.value}")


def diagram() -> str:
    """Return the table as a Mermaid state diagram. Deletion, legal everywhere, is left out."""
    lines = ["stateDiagram-v2", "    [*] --> Unknown"]
    lines += [
        f"    {one.before.value} --> {one.after.value}: {one.cause}"
        for one in TRANSITIONS
        if one.after is not Phase.DELETED
    ]
    return "\n".join([*lines, "    Ended --> [*]"])
