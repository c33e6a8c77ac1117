"""The Incident: the fault, its culprit, the remedy, and the cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unbroken.spec.keys import OWN_GROUP
from unbroken.spec.schema.fields import PreciseTime as Time

GROUP, VERSION, KIND, PLURAL = OWN_GROUP, "v1", "Incident", "incidents"
RECOVERED = "recovered"
"""Outcome of an incident after which the job continued, or completed."""

PLANNED_MOVE = "PlannedMove"
"""Class of an incident that is no fault: a job has left a node before the node went."""


class Remedy(Enum):
    """Rungs of the ladder, lowest first."""

    IN_PROCESS = "in-process"
    """Workers that can leave their training function keep their process and call it again."""
    PROCESS = "process"
    """New worker processes start in the same pods."""
    POD = "pod"
    """Lost pods are replaced; the other pods stay."""
    JOB = "job"
    """All pods are replaced."""
    FAIL = "fail"
    """The job fails: its restart budget is used up, or a restart would repeat the error."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One symptom of the fault, as it came in."""

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
    """Exit code of the worker, as a shell shows it: 128 + n if signal n ended it. None: no worker
    ended."""
    fingerprint: str = ""
    """Equal for the same exception at the same place; empty: there was none."""
    step: int | None = None
    """Newest step that the rank had reported."""
    rule: str = ""
    """Name of the log rule that was broken; empty: none was."""
    violation: str = ""
    """How it was broken: Hang, Slow or Fault (`wire.agent.Violation`)."""


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that were found in the same activity."""

    ranks: str
    """As ranges: `0-2,5`."""
    count: int
    doing: str
    """In words: `waits in all_reduce`, `stopped by a signal`."""
    stack: tuple[str, ...] = ()
    """Stack of the main thread, innermost first; bounded."""
    is_outlier: bool = False
    """Their activity differs from that of the ranks that wait for them."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Ranks that continued with the same state from the same place."""

    ranks: str
    """As ranges: `0-2,5`."""
    count: int
    step: int
    """Step after which it was saved."""
    source: str
    """`memory`, `buddy NODE RANK`, `replica rank N` or `disk`."""
    seconds: float
    """Seconds of the rank that took longest."""
    slowest: int
    """The rank that took longest."""
    checksum: str = ""
    """Checksum of the state's bytes; empty: not reported, or there were too many."""
    name: str = ""
    """Name of the snapshot."""
    saved_attempt: int | None = None
    """Attempt in which it was saved; None: not known."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault of one job.  Times are seconds since the epoch, None: not reached."""

    number: int
    """1, 2, 3, ... within the job."""
    attempt: int
    """The attempt that broke."""
    culprit: Symptom
    """First cause among the symptoms."""
    signals: tuple[Symptom, ...]
    """All symptoms, in order of time, the culprit among them; named as in JSON."""
    remedy: Remedy
    reason: str
    """Why this remedy was chosen."""
    detected_at: Time
    stopped_at: Time | None = None
    """No worker of the attempt is alive any more."""
    ready_at: Time | None = None
    """Every agent of the next attempt is ready to start."""
    examined_at: Time | None = None
    """All ranks were looked at, before anything was stopped; None: there was no need."""
    started_at: Time | None = None
    """Every agent runs the next attempt."""
    first_output_at: Time | None = None
    """A worker of the next attempt has first written something; it may still start."""
    progress_at: Time | None = None
    """Training has resumed: the first step of the next attempt. Without steps: its first line of a
    kind that recurred in training. None: not known."""
    ended_at: Time | None = None
    fault: str = ""
    """Fault of the culprit, as the job's condition names it: LogHang_RULE, SIGKILL, or its class.
    Set when the incident is written."""
    outcome: str = ""
    """`recovered`, or why not; empty while open."""
    confidence: str = ""
    """`certain`, `likely` or `unsure` of the culprit; empty: nothing had to be compared."""
    blame: str = ""
    """Why this rank is the culprit, in a sentence."""
    groups: tuple[StackGroup, ...] = ()
    """Activities of the ranks, the outliers first."""
    progress_before: Time | None = None
    """Last step or other sign of progress before the fault; None: unknown."""
    step: int | None = None
    """Newest step of the job, by any rank; None: the script reports none."""
    resumed_step: int | None = None
    """First step that the next attempt reported."""
    step_seconds: float | None = None
    """Seconds of a step before the fault."""
    kept: int | None = None
    """Ranks whose process was kept; None: none was."""
    slowest: Mapping[str, str] = field(default_factory=dict)
    """The pod that each stage (`stopped`, `ready`, `started`) waited for last."""
    restored: tuple[Restored, ...] = ()
    """States with which the ranks of the next attempt continued."""
    steps_lost: int | None = None
    """Steps from the newest before the fault back to the restored one; None: not known."""
    samples_repeated: int | None = None
    """Samples given to training again, by all ranks together; None: the script reports no
    samples."""
    samples_skipped: int | None = None
    """Samples that the state with which training continues has never seen."""
    replicas_agree: bool | None = None
    """True if ranks that call each other replicas restored the same bytes; None: none were
    reported."""
    resumed: str = ""
    """All of these facts in a sentence."""
