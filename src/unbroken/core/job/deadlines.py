"""Limits of time in a job's life: which one has passed, and when the next one is due."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from unbroken.spec.job.types import RunPolicy

K = TypeVar("K", bound=Hashable)


class Timers(dict[K, float]):
    """Times since when things have lasted, the earliest first; `now` never goes back."""

    def restart(self, key: K, now: float) -> None:
        """Let the thing begin now, even if it has begun before."""
        self.pop(key, None)
        self[key] = now

    def deadline(self, seconds: float) -> float | None:
        """Return when the first thing will have lasted so long; None: there is none."""
        return next((since + seconds for since in self.values()), None)

    def expire(self, now: float, seconds: float) -> list[K]:
        """Remove and return the things that have lasted so long, the longest first."""
        expired = list(takewhile(lambda key: now >= self[key] + seconds, self))
        for key in expired:
            del self[key]
        return expired


@dataclass(frozen=True, slots=True)
class Since:
    """Start of each limited period; None: the period is not running."""

    active: float | None = None
    starting: float | None = None
    faulted: float | None = None


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """One limit and when it is reached."""

    at: float
    reason: str
    message: str


def limit(policy: RunPolicy, since: Since) -> ReachedLimit | None:
    """The limit that is reached first; None: there is none."""
    rows = (
        (since.active, policy.active_deadline_seconds, "DeadlineExceeded", "active"),
        (since.starting, policy.startup_deadline_seconds, "StartupDeadlineExceeded", "startup"),
        (since.faulted, policy.fault_deadline_seconds, "FaultDeadlineExceeded", "fault"),
    )
    found = [
        ReachedLimit(
            start + seconds, reason, f"{name}DeadlineSeconds: the limit of {seconds} s has passed"
        )
        for start, seconds, reason, name in rows
        if start is not None and seconds is not None
    ]
    return min(found, key=lambda found: found.at, default=None)


def expiry(policy: RunPolicy, ended_at: float | None) -> float | None:
    """Return when a job that has ended is to be deleted; None: never."""
    seconds = policy.ttl_seconds_after_finished
    return None if ended_at is None or seconds <= 0 else ended_at + seconds


def earliest(*times: float | None) -> float | None:
    """Return the earliest of the times; None counts as never."""
    return min((time for time in times if time is not None), default=None)
