"""What is written into a run, and what a tracker must do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

PREFIX = "unbroken."
"""Begins the names of our tags and metrics."""
ERROR_CHARACTERS = 300


class Refused(Exception):
    """The tracker does not take this, now or later."""


def shown(error: Exception) -> str:
    """Return an error without the passwords of URLs."""
    return re.sub(r"://[^/\s@]+@", "://", str(error) or repr(error))[:ERROR_CHARACTERS]


@dataclass(frozen=True)
class Entry:
    """One call of `log`."""

    number: int
    """Number of the call in this process, from 0."""
    step: int
    at: float
    """Seconds since the epoch."""
    attempt: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class RunPlan:
    """The run that a script asks for."""

    library: ModuleType
    key: str
    """Identity of the run, the same in all attempts; empty: each process has a run of its own."""
    project: str
    """Experiment or project; empty: the one that the tracker is configured with."""
    name: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]


class Tracker(Protocol):
    """One run in a tracker. All but `activate` and `deactivate` are called by the writing thread,
    and raise what the tracker raises: it is tried again, unless it is Refused."""

    def __init__(self, plan: RunPlan) -> None:
        """Keep the plan."""

    def open(self) -> str:
        """Find the run, or begin it, with its parameters; return its ID."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Write metrics. Raises Refused."""

    def describe(self, tags: Mapping[str, str]) -> None:
        """Set tags. Raises Refused."""

    def close(self, has_failed: bool) -> None:
        """End the run. Raises Refused."""

    def activate(self) -> None:
        """Make it the run of the library's own functions, in the calling thread."""

    def deactivate(self, has_failed: bool) -> None:
        """End what `activate` has begun."""
