"""A world as data: the job, the cluster, the network, and the faults with their times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from unbroken.sim.actors.api import Lag
from unbroken.sim.actors.cluster import Manners
from unbroken.sim.actors.links import Quality
from unbroken.sim.actors.snapshots import Keeping
from unbroken.sim.actors.training import Habits
from unbroken.sim.actors.watches import Rhythm
from unbroken.spec.job.types import JobSpec, Switch
from unbroken.spec.schema.fields import CHOICES

ENDS_WAITING = 0.25
"""Share of the waits of workers for their rank that end with the death of the worker."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A fault at a moment: a time, or soon after something has happened."""

    seconds: float
    name: str
    moment: Annotated[str, Meta(extra={CHOICES: ("", "start", "stop", "finish")})] = ""
    """`start` or `stop` of an attempt, `finish` of the work; empty: the beginning of the world."""
    number: int = 0
    """Number of the attempt."""


@dataclass(frozen=True, slots=True)
class Restartable:
    """Leaving of the training by workers, and their wait for the next attempt."""

    share: float
    """Share of the workers that can leave."""
    arrive_seconds: float
    """Seconds in which the arriving workers are at the barrier."""
    absent: float
    """Share that never arrives."""
    mortal: float
    """Share that dies at the barrier."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world."""

    spec: JobSpec
    nproc: int
    nodes: int
    manners: Manners
    quality: Quality
    lag: Lag
    habits: Habits
    ambiguous: float
    is_stock: bool
    kill_seconds: float
    stubborn: float
    topology: bool
    skew_seconds: float
    faults: tuple[Timed, ...]
    heal_after: float
    rhythm: Rhythm | None = None
    """Times that the watchdogs learn; None: there are no watchdogs."""
    members: Restartable | None = None
    """None: no worker can leave its training."""
    in_process: Switch = Switch.ON
    keeping: Keeping | None = None
    """None: no worker saves snapshots."""
    is_warm: bool = False
    """Agents import beforehand."""
    lease_seconds: float = 0.0
    """Lease of the workers in seconds; 0: they hold none."""
    drift: float = 0.0
    """Most by which the clocks of agents may run fast or slow, relative to the operator's."""
    are_abandoned: bool = False
    """Nodes without power stay as they are, for ever, and nobody says that they are off."""
    checks_peers: bool = False
    """Agents check whether their parent can be connected to."""
    stays_unreached: bool = False
    """A node that peers do not reach stays so for ever."""
    counts_pauses: bool = True
    """Clocks advance while their machine is paused."""
    has_waiting: bool = False
    """Stock agents are for in-process restart: workers wait for their rank."""
    busy_seconds: float = 0.0
    """Seconds, at most, that the operator is busy before it takes reports."""
