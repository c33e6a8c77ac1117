"""The latest losses of a job with auto-resume: culprit, remedy, time until it ran again.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

KEPT = 10
"""Losses that the record of a job keeps: an object has 256 KiB for all of its annotations."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of a pod or a node that auto-resume has decided on."""

    at: float
    """Time of the first sign, in seconds since the epoch."""
    decided: float
    """Time of the decision."""
    culprit: str
    """The node or the pod, such as `node n1`."""
    fault: str
    """The cause in words."""
    remedy: str
    """The decision in words."""
    restart: int = 0
    """Number of the restart; 0: the job is not restarted."""
    pods: int = 0
    """Number of pods that must run before the job counts as running again."""
    ran: float | None = None
    """Time at which the job was seen running again."""

    @property
    def is_open(self) -> bool:
        """True if the job was restarted and has not been seen running again."""
        return self.restart > 0 and self.ran is None

    @property
    def seconds(self) -> float | None:
        """Seconds from the first sign until the job ran again; None: it has not."""
        return None if self.ran is None else max(self.ran - self.at, 0.0)


@dataclass(frozen=True, slots=True)
class ResumedJob:
    """A job of any kind that asks for auto-resume."""

    kind: str
    name: str
    namespace: str
    uid: str
    created: str
    """Time of creation, as the object has it."""
    state: str
    """`Active`, `Restarting`, `Suspended`, or how the job has ended."""
    restarts: int = 0
    restarts_max: int = 0
    fault: str = ""
    """The cause of the latest restart, or the one that found no restart left."""
    losses: tuple[Loss, ...] = ()
    """Oldest first."""

    @property
    def last(self) -> Loss | None:
        """The newest loss; None: there was none."""
        return self.losses[-1] if self.losses else None


def noted(losses: Sequence[Loss], new: Loss) -> tuple[Loss, ...]:
    """Return the losses with a new one; the oldest are dropped."""
    return (*losses, new)[-KEPT:]


def closed(losses: Sequence[Loss], now: float) -> tuple[Loss, ...]:
    """Return the losses; if the newest is open, the job runs again now."""
    if not losses or not losses[-1].is_open:
        return tuple(losses)
    return (*losses[:-1], replace(losses[-1], ran=now))
