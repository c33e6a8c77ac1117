"""Events and effects of the job machine.

All times are seconds since the epoch by the operator's one clock, which never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

from unbroken.core.tick import Tick
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import JobOptions, JobSpec, JobStatus
from unbroken.spec.nodes.notices import Notice
from unbroken.wire.agent import PORT, AgentReport, Request, StartCommand, StopCommand
from unbroken.wire.observation import Evidence

from .kueue import Gate

PodUid = NewType("PodUid", str)
PodName = NewType("PodName", str)
NodeName = NewType("NodeName", str)


class PodPhase(Enum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class PodView:
    """The fields of a pod that the operator needs."""

    name: PodName
    uid: PodUid
    replica_spec: str
    index: int
    phase: PodPhase
    node: NodeName | None = None
    address: str | None = None
    is_deleting: bool = False
    has_ended: bool = False
    """The pod is being deleted, and the API reports that each of its containers has ended."""
    has_been_ready: bool = False
    """Its containers have started at least once (kubelet's ContainersReady or a restart count)."""
    reason: str = ""
    message: str = ""
    """Why it is pending, waiting or failed, for people."""
    last_lines: tuple[str, ...] = ()
    """The last lines that the ended container wrote."""
    ends: int = 0
    """Number of times that a container which the agent depends on has ended; 0 while it runs."""
    agent_port: int = PORT


@dataclass(frozen=True, slots=True)
class NodeView:
    """The fields of a node that the operator needs."""

    name: NodeName
    is_ready: bool
    is_fenced: bool = False
    """Proven to run nothing: tainted node.kubernetes.io/out-of-service."""
    is_healthy: bool = True
    """False: its health label or a condition says that the node must not be used or must be
    left."""
    topology: tuple[str, ...] = ()
    """Values of the topology labels, widest first; pods are ordered by it at first assignment."""
    topology_keys: tuple[str, ...] = ()
    """Keys of these labels; empty where the node has none."""
    notice: Notice | None = None
    """Says that the node will be lost; None: nothing does."""

    @property
    def is_usable(self) -> bool:
        """True if new pods should be put on it."""
        is_up = self.is_ready and not self.is_fenced
        return is_up and self.is_healthy and self.notice is None


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The job object was read; comes first, and again whenever its spec changed."""

    spec: JobSpec
    options: JobOptions = field(default_factory=JobOptions)
    """A `restart` later than the last one is a new request; `log_rule_ranks` apply from the next
    start."""
    is_deleting: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    """The ledger as found when the operator started. The operator's own writes are not reported
    again."""
    gate: Gate = None
    """The queue's decision; a Hold suspends the job as its user can."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    pod: PodView


@dataclass(frozen=True, slots=True)
class PodGone:
    """The pod object no longer exists: its containers have ended, or its deletion was forced."""

    name: PodName
    uid: PodUid


@dataclass(frozen=True, slots=True)
class PodRefused:
    """A pod could not be created; `reason` is the API's.  `is_final`: asking again cannot help."""

    name: PodName
    reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class PodHeld:
    """A node's event about a pod that it has not started yet, or the reason why the operator does
    not believe the agent of a pod that runs: reason and message."""

    uid: PodUid
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeSeen:
    node: NodeView


@dataclass(frozen=True, slots=True)
class NodeGone:
    name: NodeName


@dataclass(frozen=True, slots=True)
class FenceProven:
    """The pod's node was read again after `ProveFence`, and is fenced or gone: nothing of the pod
    runs, nor will."""

    pod: PodUid


@dataclass(frozen=True, slots=True)
class AgentReported:
    """A state report of the agent in the pod; also sent as a heartbeat."""

    pod: PodUid
    report: AgentReport


@dataclass(frozen=True, slots=True)
class EvidenceReceived:
    """The agent in the pod has looked at its ranks, as a CollectCommand asked it to."""

    pod: PodUid
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent cannot be reached: link closed and not back at once, or silent too long."""

    pod: PodUid
    why: str
    silent_seconds: float = 0.0
    """Seconds from the agent's last message to this event."""


@dataclass(frozen=True, slots=True)
class AgentsTooLarge:
    """The reports of the job's agents take more of the operator's memory than one job may."""

    bytes: int
    budget: int
    largest: PodUid | None
    """The pod whose agent takes most; None: it is gone."""

    def text(self, largest: PodName | None) -> str:
        """Why the job ends; `largest`: the name of that pod."""
        most = f"; the most comes from pod {largest}" if largest else ""
        return (
            f"the agents' reports take {self.bytes // 1024} KiB of the operator's memory; "
            f"a job of this size may take {self.budget // 1024} KiB{most}"
        )


@dataclass(frozen=True, slots=True)
class LedgerWritten:
    """The API server has stored this ledger, or has refused it for good."""

    ledger: Ledger


@dataclass(frozen=True, slots=True)
class IncidentSeen:
    """An incident found in the API when the operator (re)started."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Synced:
    """All pods, nodes and incidents that existed when the operator started have been reported."""


JobEvent = (
    JobSeen
    | PodSeen
    | PodGone
    | PodRefused
    | PodHeld
    | NodeSeen
    | NodeGone
    | FenceProven
    | AgentReported
    | AgentLost
    | EvidenceReceived
    | AgentsTooLarge
    | IncidentSeen
    | LedgerWritten
    | Synced
    | Tick
)


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod `<job>-<replica spec>-<index>`, away from the nodes in `avoid`."""

    name: PodName
    replica_spec: str
    index: int
    avoid: tuple[NodeName, ...] = ()
    """Nodes in order of name."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod with this uid, and no other of the same name.  `force`: grace 0; only for pods
    that are proven not to run."""

    name: PodName
    uid: PodUid
    reason: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class FenceNode:
    """Ask for proof that nothing runs on the node: its power off, or its pods killed."""

    node: NodeName
    pod: PodUid
    """The pod that the proof is needed for."""
    reason: str


@dataclass(frozen=True, slots=True)
class ProveFence:
    """Read the pod's node again; `FenceProven` answers if the node is fenced or gone.

    Nodes and pods are watched by separate streams. The node's fence in the watch may date from
    before the node came back and the pod was placed there.
    """

    node: NodeName
    pod: PodUid


@dataclass(frozen=True, slots=True)
class StartWorkers:
    pod: PodUid
    command: StartCommand


@dataclass(frozen=True, slots=True)
class StopWorkers:
    pod: PodUid
    command: StopCommand


@dataclass(frozen=True, slots=True)
class AskAgent:
    """Send an agent a request.

    A CollectCommand is answered by `EvidenceReceived`, or not at all. The result of a WarmCommand
    and the version of a HistoryCommand are in the agent's reports.
    """

    pod: PodUid
    request: Request


@dataclass(frozen=True, slots=True)
class WriteLedger:
    """The job's ledger is now this; as with the status, the newest counts."""

    ledger: Ledger
    is_awaited: bool = False
    """A start waits for it: it is written at once, and `LedgerWritten` answers."""


@dataclass(frozen=True, slots=True)
class DeleteIncident:
    """Delete the Incident object of this number: there are too many."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """The job's status is now this; the newest replaces older ones that are not yet written.

    A DeletePod or DeleteJob that follows in the same step waits until the status is written. The
    pods of an ended job are the only other record of how it ended.
    """

    status: JobStatus


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """A Kubernetes event on the job, sent after the status write that it belongs to."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class WriteIncident:
    """Create or replace the Incident object of this number."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job: its time after the end is over."""

    reason: str


JobEffect = (
    CreatePod
    | DeletePod
    | FenceNode
    | ProveFence
    | StartWorkers
    | StopWorkers
    | AskAgent
    | WriteStatus
    | RecordEvent
    | WriteIncident
    | WriteLedger
    | DeleteIncident
    | DeleteJob
)


class JobMachine(Protocol):
    """Decides about a job: `core.job.machine.Job`, or a stand-in of a simulation."""

    @property
    def status(self) -> JobStatus:
        """The status as it is to be written."""

    def steps(self, events: Sequence[JobEvent], now: float) -> list[JobEffect]:
        """Take events that came together (reports, and the event after them); return orders."""

    def deadline(self) -> float | None:
        """Return when a Tick is due if no event comes first."""
