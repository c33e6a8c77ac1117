"""Messages between the operator and the agents, and between agents while no operator answers.

Messages have two forms with one meaning. The documented HTTP endpoints (HyperPod agent 1.1.3) carry
`StartCommand`, `StopCommand` and the status. The link (`/v1/link`, WebSocket) carries the same
commands to the agent, and `AgentReport` back, whenever it changes and as a heartbeat. A command
states what should be and is repeated while that matters; a report states what is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta

from .codec import KEEPS_LAST, REQUIRED, UNKNOWN, Amount, Natural, Real, Text
from .observation import CollectCommand, RankWatch

PORT = 8080
LINK_PATH = "/v1/link"
LEASE_PATH = "/v1/lease"
"""Path of questions of other agents of the attempt (`core.agent.peers`)."""
IMPORTS_PATH = "/v1/imports"
"""Path of the modules that workers import, for agents that have started none: `modules`, names in
order."""
LEFT_OUT_MAX = 5
"""Reasons in a report for which modules are not imported beforehand."""
IMPORTS_MAX = 20_000
ADDRESS_CHARACTERS = 300
"""Characters of `host:port`; a host name has 253 at most."""
WARM_PEERS_MAX = 3
WORKERS_MAX = 1024
"""Workers of an agent, and entries of each list in its report."""
FAULTS_MAX = 256
RULES_MAX = 1024
RULE_CHARACTERS = 256
"""Characters of a log rule's name in a fault; the definition of jobs allows 253."""
LINES_MAX = 64
"""Lines of one fault; an agent sends 24."""
RECEIPT_CHARACTERS = 256
"""Characters of each text of a receipt."""
HISTORY_MAX, PAST_CHARACTERS = 50, 400
"""Incidents in a `HistoryCommand`, and characters of each of their texts."""
AGENT_ID_CHARACTERS = 128
"""Characters of an agent's id; an id of this project's agent has 32."""
HEARTBEAT_SECONDS = 1.0
"""Seconds of the longest silence of a healthy agent on the link, unless the link requests
another."""
HEARTBEAT_KEY = "heartbeat"
"""Key in the link's query: seconds.  An agent that does not know it keeps to HEARTBEAT_SECONDS."""
HEARTBEAT_SECONDS_MAX = 60.0
LEASE_OVER = "LeaseOver"
"""`AgentReport.reason` of an agent whose workers have ended with their lease."""
PROCESS_RESTART, IN_PROCESS_RESTART = "process_level_restart", "in_process_restart"
"""`StopCommand.restart_mode`: no process is kept; or those are that can leave their training."""


class Violation(Enum):
    """How a log rule was broken."""

    HANG = "Hang"
    """No match came in time."""
    SLOW = "Slow"
    """Captured values were bad for too long."""
    FAULT = "Fault"
    """A line matched that marks a fault."""


def rule_reason(violation: str, rule: str) -> str:
    """Return the reason of a broken log rule, as HyperPod's agent names it: `LogHang_RULE`."""
    return f"Log{violation}_{rule}"


class AgentState(Enum):
    """States of the agent; lower case on the wire."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


class FaultKind(Enum):
    """Why a worker, or an agent's attempt to run one, failed."""

    EXCEPTION = "PythonException"
    """The worker ended with a Python exception."""
    EXIT_CODE = "ExitCode"
    """The worker ended with an exit code other than 0, without a traceback."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The container or the GPU ran out of memory."""
    SEGMENTATION_FAULT = "SegmentationFault"
    """SIGSEGV killed the worker."""
    SHARED_MEMORY_FULL = "SharedMemoryFull"
    """/dev/shm is full."""
    CUDA_ERROR = "CudaError"
    """The GPU, its driver or a kernel broke; a kernel's complaint about its data is not meant."""
    DISK_FULL = "DiskFull"
    """A disk or a quota is full."""
    SIGNAL = "Signal"
    """Another signal killed the worker, for example SIGKILL."""
    STORE_PORT_TAKEN = "StorePortTaken"
    """Rank 0 could not listen on MASTER_PORT, which another program uses."""
    PEER_LOST = "PeerLost"
    """The worker only noticed that another one was gone; never a first cause."""
    EARLY_EXIT = "EarlyExit"
    """The worker ended with 0 while others of its attempt still ran, and they failed for it."""
    NOT_STARTED = "NotStarted"
    """The program could not be started at all."""
    PRE_TRAIN = "PreTrainScript"
    """The script of `--pre-train-script` failed."""
    POST_TRAIN = "PostTrainScript"
    """The script of `--post-train-script` failed."""
    LOG_RULE = "LogRule"
    """A log rule of the job matched, or a line that it requires did not come in time."""
    REPORTED = "Reported"
    """A worker reported the fault itself, over its socket."""


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """The fault that ended one worker."""

    kind: Annotated[FaultKind, Meta(extra={UNKNOWN: FaultKind.EXIT_CODE})]
    """Kind of the fault; a newer agent may have further kinds, whose exit status still counts."""
    local_rank: Natural
    rank: Natural
    pid: Natural
    at: Real
    """Seconds since the epoch, when the agent learned of it."""
    exit_code: Natural | None = None
    """Exit code; None: ended by `signal`, or never started."""
    signal: Natural | None = None
    message: Text = ""
    fingerprint: Text = ""
    """Equal for the same error at the same place; empty: there was no exception."""
    lines: Annotated[tuple[Text, ...], Meta(max_length=LINES_MAX), KEEPS_LAST] = ()
    """Last lines of the traceback, or of the output; bounded."""
    step: Natural | None = None
    """Newest step that the worker had reported."""
    rule: Annotated[str, Meta(max_length=RULE_CHARACTERS)] = ""
    """Name of the log rule that was broken; empty: none was."""
    violation: Annotated[Violation | None, Meta(extra={UNKNOWN: Violation.FAULT})] = None
    """How that rule was broken; None: none was."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The present state of one worker."""

    local_rank: Natural
    rank: Natural
    pid: Natural
    state: Annotated[Text, REQUIRED]
    """running, succeeded, failed, stopped."""
    started_at: Real
    ended_at: Real | None = None
    first_output_at: Real | None = None
    start: Text = ""
    """cold, or warm: with its imports done; empty: not known."""
    recurring_line_at: Real | None = None
    """First line of the attempt of a kind that recurs in training, such as losses; None: not known,
    or an older agent."""


@dataclass(frozen=True, slots=True)
class WarmReport:
    """How the workers will start next."""

    cold_because: Text = ""
    """Why the next start is cold; empty: it is warm."""
    modules: Natural = 0
    """Modules that a warm worker does not import itself."""
    seconds: Amount = 0.0
    """Duration of these imports in the template; 0: not known."""
    left_out: Annotated[tuple[Text, ...], Meta(max_length=LEFT_OUT_MAX)] = ()
    """Modules that a warm worker imports itself, and why: a line for each reason."""
    for_rank: Natural = 0
    """Modules that parked workers have imported for their rank, beside those of the template."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt of a rank for what it has restored from a snapshot, as reported to its agent."""

    rank: Natural
    attempt: Natural
    """Attempt in which it was restored."""
    step: Natural
    """Step after which it was saved: training continues with the next one."""
    source: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS), REQUIRED]
    """`memory`, `buddy NODE RANK`, `replica rank N` or `disk`."""
    seconds: Real
    checksum: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS)]
    """Checksum of the state's bytes; equal states have equal checksums."""
    saved_attempt: Natural | None = None
    """Attempt in which it was saved; None: not known."""
    name: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS)] = ""
    """Name of the snapshot."""
    replicas: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS)] = ""
    """Ranks that hold the same state, itself among them, as ranges (`0-2,5`); empty: no others."""


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """Snapshots of one rank under one name, in this attempt."""

    rank: Natural
    name: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS), REQUIRED]
    step: Natural
    """Newest step in the memory of its agent."""
    state_bytes: Natural
    """Bytes of the state."""
    save_seconds: Amount | None = None
    """Seconds for which a save holds up training, the median of the last saves; None: an older
    worker does not report it."""
    buddy_step: Natural | None = None
    """Newest step that the buddy has whole; None: none."""
    common_step: Natural | None = None
    """Newest step that all nodes hold, here and at their buddies; None: there is none."""
    replicas: Annotated[str, Meta(max_length=RECEIPT_CHARACTERS)] = ""
    """Ranks that hold the same state, itself among them, as ranges (`0-2,5`); empty: no others.
    `...` at its end: there are more."""


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """Snapshots of an agent's ranks, and what they cost."""

    ranks: Annotated[tuple[SnapshotState, ...], Meta(max_length=WORKERS_MAX)] = ()
    """Ranks that have saved in this attempt, by name and rank."""
    buddy: Annotated[str, Meta(max_length=ADDRESS_CHARACTERS)] = ""
    """Address of the agent that gets copies; empty: none does."""
    bytes_per_second: Amount | None = None
    """Rate at which snapshots reach the buddy, the median of the last ones; None: none did."""
    memory_bytes: Natural = 0
    """Memory of the node that snapshots take: slots, and copies of its own and of other ranks."""
    missing_bytes: Natural = 0
    """Memory that is missing for snapshots of all ranks, so that this pod saves none; 0: none."""
    copies_missing_bytes: Natural = 0
    """Memory that is missing for copies of all ranks, so that this pod has none; 0: none."""


class RuleState(Enum):
    """State of a log rule on a node; the worst over its ranks."""

    WAITING = "Waiting"
    HEALTHY = "Healthy"
    SLOW = "Slow"
    HANGING = "Hanging"
    FAULTED = "Faulted"
    STOPPED = "Stopped"
    """Its stopPattern has matched."""


@dataclass(frozen=True, slots=True)
class RuleView:
    """The present state of one log rule on a node."""

    name: Text
    state: RuleState
    ranks: Text
    """`some`, `node`, `every`, or ranks."""
    matches: Natural = 0
    bad_points: Natural = 0
    """Bad data points in a row, on the worst rank."""
    unreadable: Natural = 0
    """Captured texts that are no numbers."""
    last_match_at: Real | None = None
    last_rank: Natural | None = None
    last_stream: Text = ""
    last_line: Text = ""
    last_value: Text = ""
    """Last value, as logged."""


@dataclass(frozen=True, slots=True)
class StartCommand:
    """Run the workers of an attempt. The agent refuses one older than the newest it has seen."""

    attempt: int
    """`faultCount` on the wire."""
    rank: int
    """Node rank, 0..nnodes-1; a worker's rank is rank * nproc + local rank."""
    nnodes: int
    master_addr: str
    master_port: int
    log_rules: tuple[Mapping[str, Any], ...] = ()
    """Log rules with the CRD's own keys; for agents of this project also `ranks`, which must
    log."""
    detectors: Mapping[str, str] = field(default_factory=dict)
    """Mode by name (`spec.job.detectors`); a missing one has its default."""
    spare: bool = False
    ip_version: str | None = None
    rank_ips: tuple[tuple[int, str], ...] | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    worker_data: Any = None
    """Data that the workers of all nodes have reported, for workers of an agent for in-process
    restart."""
    buddy: str = ""
    """`host:port` of the agent that gets copies of this node's snapshots; empty: none does."""
    holders: tuple[str, ...] = ()
    """`host:port` of agents that may have copies of what the ranks of this node saved in older
    attempts, likeliest first."""
    lease_seconds: float = 0.0
    """Seconds without renewal of their lease after which the workers end (`core.agent.machine`); 0:
    they need none."""
    parent: str = ""
    """`host:port` of the agent that vouches for the attempt while no operator answers; empty: this
    agent is the first, or there is no lease."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Stop all workers of `attempt` and of earlier ones, and be ready for the next.

    `attempt` None (a plain `/stop` of another client): everything that runs.
    """

    attempt: int | None = None
    restart_mode: str = PROCESS_RESTART
    """Restart mode; of two stops for one attempt the harder mode counts, whichever comes first."""
    is_graceful: bool = False
    timeout_seconds: float | None = None
    """Seconds until workers are killed; None: the agent's own `--shutdown-timeout`."""


@dataclass(frozen=True, slots=True)
class ShutdownCommand:
    """End the workers and the agent."""


Command = StartCommand | StopCommand | ShutdownCommand
"""States what should be; the newest counts, and is sent until the agent reports it."""


@dataclass(frozen=True, slots=True)
class WarmCommand:
    """Import beforehand the modules that workers of other agents have imported; starts and stops
    nothing."""

    peers: Annotated[tuple[Text, ...], Meta(max_length=WARM_PEERS_MAX)]
    """`host:port` of agents that know the modules (`IMPORTS_PATH`), best first."""


@dataclass(frozen=True, slots=True)
class PastIncident:
    """A closed incident, as an experiment tracker shows it; its texts are without secrets."""

    number: Natural
    attempt: Natural
    """The attempt that broke."""
    fault: Annotated[str, Meta(max_length=PAST_CHARACTERS)]
    culprit: Annotated[str, Meta(max_length=PAST_CHARACTERS)]
    """Rank, pod, node and error of the culprit, in one line."""
    remedy: Annotated[str, Meta(max_length=PAST_CHARACTERS)]
    seconds: Amount | None = None
    """Seconds that it has cost; None: not known."""
    steps_lost: Natural | None = None


@dataclass(frozen=True, slots=True)
class HistoryCommand:
    """Keep the job's incidents for a worker that asks for them (`worker.track`)."""

    version: Natural
    """Changes with the incidents; never 0."""
    incidents: Annotated[tuple[PastIncident, ...], Meta(max_length=HISTORY_MAX)]
    """The newest incidents, oldest first."""
    restarts: Natural
    """Number of restarts so far, those of older incidents included."""
    seconds_lost: Amount
    """Seconds that all faults have cost."""
    steps_lost: Natural
    goodput: Amount | None = None
    """Share of the time in which the job made progress, from 0 to 1; None: not known."""


Request = CollectCommand | WarmCommand | HistoryCommand
"""Sent once, to an agent that is linked; it may be lost."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The operator's answer to a Beat, which renews the lease on the agent's workers."""

    at: Real
    """Time in the Beat."""


@dataclass(frozen=True, slots=True)
class Beat:
    """An agent's question whether its workers are still wanted."""

    at: Real
    """The agent's own time, which is only meaningful to itself."""


ToAgent = Command | Request
"""Messages of an operator to an agent; `wire.agent_codec.FRAMES` has the frame of each."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The whole state of an agent.

    `attempt` and `newest_attempt` fence: a report names its attempt. In READY it states that no
    worker of `newest_attempt` or an earlier one is alive.
    """

    agent_id: Annotated[str, Meta(max_length=AGENT_ID_CHARACTERS), REQUIRED]
    """Id that each agent process chooses; a different one means that the old process's workers are
    gone."""
    state: AgentState
    newest_attempt: Natural | None = None
    """Newest attempt that it was ordered to start or to stop; None: none yet, or a stock agent."""
    attempt: Natural | None = None
    """Attempt whose workers run, have completed or have failed; None in READY."""
    rank: Natural | None = None
    """Node rank last assigned; kept over stops."""
    master_addr: Text | None = None
    master_port: Natural | None = None
    nproc: Natural | None = None
    pid: Natural | None = None
    """Pid of the agent, in its own pod's view."""
    offered_port: Natural | None = None
    """A port found free on the agent's host, for the store of the next attempt if this agent gets
    rank 0.

    It is a new one for each attempt. None: a stock agent.
    """
    workers: Annotated[tuple[WorkerReport, ...], Meta(max_length=WORKERS_MAX)] = ()
    faults: Annotated[tuple[WorkerFault, ...], Meta(max_length=FAULTS_MAX)] = ()
    log_rules: Annotated[tuple[RuleView, ...], Meta(max_length=RULES_MAX)] = ()
    """Log rules of the attempt; counts may lag by a second, states do not."""
    watch: Annotated[tuple[RankWatch, ...], Meta(max_length=WORKERS_MAX)] = ()
    """Watched ranks of the attempt, by rank; steps may lag by a second, alarms do not."""
    reason: Text = ""
    message: Text = ""
    agent_version: Text = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    kept: Annotated[tuple[Natural, ...], Meta(max_length=WORKERS_MAX)] = ()
    """In READY: global ranks whose processes wait at the barrier for the next attempt."""
    restart_mode: Text = ""
    """Restart mode that a stock agent was started for."""
    is_unstarted: bool = False
    """In FAULTED: a stock agent's workers ended before the start of the next attempt.

    An agent of this project names no attempt in such a report.
    """
    receipts: Annotated[tuple[Receipt, ...], Meta(max_length=WORKERS_MAX)] = ()
    """Receipts of the attempt, one of each rank at most for each name."""
    copies: Annotated[tuple[Natural, ...], Meta(max_length=WORKERS_MAX)] = ()
    """Node ranks of which it holds snapshots as their buddy."""
    snapshots: SnapshotReport | None = None
    """Snapshots of its ranks; may lag by a second. None: none was saved, or an older agent."""
    imports: Natural | None = None
    """Modules that a usable template was ordered to import.

    None: the agent starts no workers warm, or the job names the modules.
    """
    warm: WarmReport | None = None
    """None: the agent starts no workers warm, or none so far."""
    lease_seconds: Amount | None = None
    """Lease of the newest attempt that it has started, in seconds; 0: none. None: the agent does
    not support leases."""
    unvouched: Natural | None = None
    """The newest attempt that it has started, if it has never vouched for it to a peer.

    Peers have then renewed no lease in that attempt. None: it may have vouched.
    """
    has_ended: bool = False
    """In SHUTDOWN: none of its workers is alive, and it will start none; its last report."""
    unreached: Annotated[str, Meta(max_length=ADDRESS_CHARACTERS)] = ""
    """Address of its parent among the agents of the attempt that it cannot connect
    to; empty: it can, or has no parent."""
    history: Natural | None = None
    """Version of the HistoryCommand that it has; 0: it has none, and a worker has asked. None: no
    worker has asked."""


ANSWER_BYTES_MAX = 4096
FANOUT = 128
"""Children of an agent: 16,000 agents are two levels below the root."""


def parent_of(rank: int) -> int | None:
    """Return the node rank that this one asks; None: it is the root."""
    return None if rank == 0 else (rank - 1) // FANOUT


def children_of(rank: int, nnodes: int) -> range:
    """Return the node ranks that ask this one."""
    first = rank * FANOUT + 1
    return range(first, min(first + FANOUT, nnodes))


@dataclass(frozen=True, slots=True)
class PeerQuestion:
    """A child's question to its parent: the body of a request to `LEASE_PATH`."""

    attempt: Natural
    rank: Natural
    agent_id: Annotated[str, Meta(max_length=AGENT_ID_CHARACTERS)] = ""
    """Id of the parent in its last answer; empty: there was none."""
    token: Real = 0.0
    """The time of that answer, on the parent's clock."""
    age: Amount | None = None
    """Seconds since the child and all below it were certainly running; None: not all have
    answered."""
    is_urgent: bool = True
    """The lease of the child, or of an agent below it, ends soon. (Agents that never say so are of
    an earlier version.)"""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """A parent's answer."""

    agent_id: Annotated[str, Meta(max_length=AGENT_ID_CHARACTERS), REQUIRED]
    token: Real
    age: Amount | None = None
    """Seconds since all agents were certainly running the attempt; None: not all have answered."""
