"""The NodeCheck: nodes to be tested, and what was found.

Made by `unbroken check`, by the cluster API, when a node joins, and after a repair.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from unbroken.spec.schema.fields import Limits

Time = Annotated[float, Limits(is_time=True, has_microseconds=True)]
KEPT_SECONDS = 86400.0
"""An ended check is deleted after that."""


class CheckKind(Enum):
    """What is tested; all but BASIC have SageMaker's names."""

    BASIC = "Basic"
    """Seconds: is all there, does it answer."""
    STRESS = "InstanceStress"
    CONNECTIVITY = "InstanceConnectivity"
    TRAINING = "MultiNodeTrainingValidation"


class CheckPhase(Enum):
    """Where a check stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    """A node is faulty: `status.faulty` names it."""
    UNKNOWN = "Unknown"
    """It could not be made, or not to its end: `status.message` says why.  No node is blamed."""


class Outcome(Enum):
    """Outcome of one test on one node."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The tool or the part is missing: no fault."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One test on one node."""

    node: str
    kind: CheckKind
    test: str
    """Such as `memory-pattern`, `disk-read-back`, `all-reduce-bandwidth`."""
    outcome: Outcome
    seconds: float
    message: str = ""
    measured: float | None = None
    expected: float | None = None
    """The limit that it was held against."""
    unit: str = ""
    peer: str = ""
    """The other node of a pair."""


@dataclass(frozen=True, slots=True)
class NodeCheckSpec:
    """What is to be tested."""

    nodes: tuple[str, ...]
    kinds: tuple[CheckKind, ...] = (CheckKind.BASIC,)
    reason: str = ""
    """Author and reason of the check, in words."""
    is_forced: bool = False
    """Test nodes beside the pods that train there; else a busy node is waited for."""
    timeout_seconds: Annotated[int, Limits(minimum=1)] = 7200


@dataclass(frozen=True, slots=True)
class NodeCheckStatus:
    """What was found."""

    phase: CheckPhase = CheckPhase.PENDING
    message: str = ""
    """What it is doing or waiting for, or the result in a line."""
    started_at: Time | None = None
    ended_at: Time | None = None
    done: int = 0
    total: int = 0
    """Tests so far, and in all."""
    results: tuple[CheckResult, ...] = ()
    faulty: tuple[str, ...] = ()
    """Nodes found at fault."""
