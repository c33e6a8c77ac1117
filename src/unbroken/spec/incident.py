"""The Incident: what broke, who did it, what was done, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from .fields import Limits

GROUP, VERSION, KIND, PLURAL = "unbroken.dev", "v1", "Incident", "incidents"

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]
"""Seconds since the epoch; RFC 3339 in microseconds on the wire."""


class Remedy(Enum):
    """Rungs of the ladder, lowest first."""

    IN_PROCESS = "in-process"
    PROCESS = "process"
    POD = "pod"
    JOB = "job"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Signal:
    """One sign of the fault, as it came in."""

    at: Time
    fault: str
    """Class of the fault: `wire.agent.FaultKind` or one of the operator's own (AgentLost, NodeLost,
    PodFailed, PodDeleted, StartTimeout)."""
    text: str
    pod: str = ""
    node: str = ""
    rank: int | None = None
    """Global rank; None: the sign is of a whole pod or node."""
    evidence: tuple[str, ...] = ()
    """Last lines of the traceback or the log; bounded."""
    exit_code: int | None = None
    """Of the worker, as a shell shows it: 128 + n where signal n ended it.  None: none ended."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault of one job.  Times are seconds since the epoch, None: not reached."""

    number: int
    """1, 2, 3, ... within the job."""
    attempt: int
    """The attempt that broke."""
    culprit: Signal
    """First cause among the signals."""
    signals: tuple[Signal, ...]
    """All of them, in order of time, the culprit among them."""
    remedy: Remedy
    reason: str
    """Why this remedy."""
    detected_at: Time
    stopped_at: Time | None = None
    """No worker of the attempt lives any more."""
    ready_at: Time | None = None
    """Every agent of the next attempt is ready to start."""
    started_at: Time | None = None
    """Every agent runs the next attempt."""
    progress_at: Time | None = None
    """A worker of the next attempt has made its first output."""
    ended_at: Time | None = None
    outcome: str = ""
    """`recovered`, or why not; empty while open."""
