"""The NodeCheck: nodes to be tested, and the results.

It is made by `unbroken check`, by the cluster API, when a node joins, and after a repair.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from unbroken.spec.schema.fields import Limits

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]
KEPT_SECONDS = 86400.0
"""Seconds after which an ended check is deleted."""


class CheckKind(Enum):
    """Kind of a test; all but BASIC have SageMaker's names."""

    BASIC = "Basic"
    """Tests of a few seconds: whether every part exists and answers."""
    STRESS = "InstanceStress"
    CONNECTIVITY = "InstanceConnectivity"
    TRAINING = "MultiNodeTrainingValidation"


class CheckPhase(Enum):
    """Progress of a check."""

    PENDING = "Pending"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    """A node is faulty: `status.faulty` names it."""
    UNKNOWN = "Unknown"
    """It could not be run or completed: `status.message` has the reason. No node is blamed."""


class Outcome(Enum):
    """Outcome of one test on one node."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The test could not be run or completed: no fault."""
    SKIPPED = "skipped"
    """The node has no such hardware."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One test on one node."""

    node: str
    kind: CheckKind
    test: str
    """Name such as `memory-pattern`, `disk-read-back`, `all-reduce-bandwidth`."""
    outcome: Outcome
    seconds: float
    message: str = ""
    measured: float | None = None
    expected: float | None = None
    """The limit that the value was compared with."""
    unit: str = ""
    peer: str = ""
    """The other node of a pair."""


@dataclass(frozen=True, slots=True)
class NodeCheckSpec:
    """The nodes and tests of a check."""

    nodes: tuple[str, ...]
    kinds: tuple[CheckKind, ...] = (CheckKind.BASIC,)
    reason: str = ""
    """Author and reason of the check, in words."""
    is_forced: bool = False
    """Test nodes while pods train there; otherwise wait for a busy node."""
    timeout_seconds: Annotated[int, Limits(minimum=1)] = 7200


@dataclass(frozen=True, slots=True)
class NodeCheckStatus:
    """The results of a check."""

    phase: CheckPhase = CheckPhase.PENDING
    message: str = ""
    """Its activity, the reason of its wait, or the result, in a line."""
    started_at: Time | None = None
    ended_at: Time | None = None
    done: int = 0
    total: int = 0
    """Tests so far, and in all."""
    results: tuple[CheckResult, ...] = ()
    faulty: tuple[str, ...] = ()
    """Nodes found at fault."""
