"""The NodeRecord: the blame of a node, over all jobs, and its repairs.

There is one for each node, with its name; it outlives jobs, and a machine that was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from unbroken.spec.schema.fields import Limits

from .values import Action

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]
HISTORY_MAX = 20
BLAME_MAX = 50


class BlameKind(Enum):
    """Kind of evidence against a node."""

    FAULT = "fault"
    """The node's daemon saw a fault."""
    INCIDENT = "incident"
    """A job's incident names the node as culprit."""
    CHECK = "check"
    """A check failed."""
    LOST = "lost"
    """The node went silent."""
    RELAPSE = "relapse"
    """A fault within the probation after a repair."""


@dataclass(frozen=True, slots=True)
class BlameEntry:
    """One piece of evidence against a node."""

    at: Time
    kind: BlameKind
    source: str
    """Reason of the fault, `NAMESPACE/INCIDENT`, or name of the check."""
    text: str
    """The evidence, in a line."""
    weight: float
    """Points when the entry was new; they decay."""


class RepairState(Enum):
    """Stage of a repair, in order."""

    WAITING = "Waiting"
    """Waiting for its turn, for permission or for a person; `message` has the reason."""
    DRAINING = "Draining"
    """Jobs are moving off."""
    ACTING = "Acting"
    """Ordered from the provider."""
    CHECKING = "Checking"
    """The node is back and is being tested."""
    DONE = "Done"
    FAILED = "Failed"
    """The next rung, or a person, follows."""


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """One repair.  Times: seconds since the epoch, None: not reached."""

    action: Action
    reason: str
    """Reason of the repair, in a line."""
    asked_by: str
    """`daemon`, `label`, `annotation`, `check`, `lost`, or another origin."""
    state: RepairState
    began_at: Time
    """Time at which the need was seen."""
    fault: str = ""
    """Reason of the fault (`fault-reasons`), by which repeats are recognised."""
    message: str = ""
    tries: int = 0
    withdrawn_at: Time | None = None
    """Time at which it was taken out of service: jobs have a bounded time from then on to move
    off."""
    acted_at: Time | None = None
    returned_at: Time | None = None
    """Time at which the node, or its replacement, was Ready again."""
    ended_at: Time | None = None
    check: str = ""
    """NodeCheck that tests the node."""
    replacement: str = ""
    """Node that replaces it; empty: the same, or not known."""
    boot_id: str = ""
    """Boot ID of the node when the repair was ordered."""


@dataclass(frozen=True, slots=True)
class NodeRecordSpec:
    """All that is kept about a node."""

    blame: tuple[BlameEntry, ...] = ()
    """Entries, oldest first, at most BLAME_MAX."""
    repair: RepairRecord | None = None
    """The repair under way."""
    history: tuple[RepairRecord, ...] = ()
    """Ended repairs, oldest first, at most HISTORY_MAX."""
    quarantined_at: Time | None = None
    """Time since when the node takes no pods until `unbroken nodes clear`; None: it takes pods."""
    quarantine_reason: str = ""
    probation_until: Time | None = None
    """Time until which a fault counts as the last repair's failure."""
    cleared_at: Time | None = None
    cleared_by: str = ""
    """Author of the latest appeal that was granted, with its reason."""
    node_uid: str = ""
    """Uid of the Node that `machine` was taken from; empty: none was."""
    machine: str = ""
    """Provider ID that the Node had when it joined.  Only this machine is repaired: a node that is
    taken over later may name another."""
