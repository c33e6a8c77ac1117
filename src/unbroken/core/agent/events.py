"""The vocabulary of the agent's machine (`machine`): what it is told, and what it orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from unbroken.core.tick import Tick
from unbroken.wire.agent import AgentReport, Command, RuleView, StartCommand
from unbroken.wire.observation import RankWatch

from .faults import SIGKILL, WorkerEnd

if TYPE_CHECKING:
    # Where a job has no rules, the agent does not load what evaluates them.
    from unbroken.core.logs.rule_events import RuleViolated


class ProgramStage(Enum):
    """The programs of an attempt, in order; values are prefixes of log directories."""

    PRE_TRAIN = "pre_train"
    TRAIN = "train"
    POST_TRAIN = "post_train"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent was started with."""

    agent_id: str
    nproc: int
    nnodes: int = 1
    """As the agent was told at its start; each attempt has its own number."""
    pid: int | None = None
    has_pre_train: bool = False
    has_post_train: bool = False
    stop_signal: int = SIGKILL
    """For a stop that is not graceful: SIGKILL or SIGTERM."""
    shutdown_timeout_seconds: float = 15.0
    """From a signal that asks to SIGKILL, where the command names no time."""
    agent_version: str = ""
    is_inprocess: bool = False
    """`--inprocess-restart`: workers wait for their ranks at the barrier before each attempt."""
    arrive_seconds: float = 5.0
    """From the order to leave the training to SIGKILL for who is not at the barrier."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The agent listens; it may be told to start."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator, or whoever has the job's key, has said what should be."""

    command: Command


@dataclass(frozen=True, slots=True)
class StageStarted:
    """Every worker of the stage has a process."""

    attempt: int
    stage: ProgramStage
    pids: tuple[int, ...]
    local_ranks: tuple[int, ...] | None = None
    """Local ranks that the `pids` belong to; None: from 0."""
    starts: tuple[str, ...] = ()
    """`cold` or `warm`, of each; empty: not known."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A worker could not be started; those before it may run."""

    attempt: int
    stage: ProgramStage
    local_rank: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker's own process ended; what it has started may still live."""

    attempt: int
    stage: ProgramStage
    local_rank: int
    end: WorkerEnd
    step: int | None = None
    """Newest that it had told."""
    at: float | None = None
    """When it was seen to have ended; its last words are read after that.  None: just now."""
    is_signalled: bool = True
    """The agent had sent it a signal by then, of which it may have died."""
    pid: int | None = None
    """None: only one process can be meant."""


@dataclass(frozen=True, slots=True)
class TurnedCold:
    """A worker that was to start warm starts cold, in the same process."""

    attempt: int
    stage: ProgramStage
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """A worker of the training stage wrote its first byte."""

    attempt: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class RulesRead:
    """What the log rules say of the output read so far."""

    attempt: int
    views: tuple[RuleView, ...]
    violations: tuple[RuleViolated, ...] = ()
    """New ones, in order."""


@dataclass(frozen=True, slots=True)
class WatchRead:
    """What the watchdog says of the training workers."""

    attempt: int
    views: tuple[RankWatch, ...]


@dataclass(frozen=True, slots=True)
class NothingLives:
    """Answer to `KillAll`: no process that descends from any worker lives, but for the kept."""

    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker says that it leaves its training when it is told."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """As of `Arrived`."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """It has left its training, and waits at the barrier."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """Attempt that it has left; None: it does not say, as stock clients."""


@dataclass(frozen=True, slots=True)
class Passed:
    """It has taken over what it was released with, and trains."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """As of `Arrived`."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """It can be told nothing any more, or does not leave its training any more."""

    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class FaultReported:
    """A worker says that its training has failed."""

    local_rank: int
    pid: int
    restart_mode: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointsTold:
    """Which checkpoints are complete on this node, as `/status` has it."""

    progress: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PortFound:
    """Answer to `OfferPort`: a free one, never offered before by this agent, nor used."""

    port: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """The agent itself was sent SIGTERM, SIGINT or the like."""

    signal: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The operator has answered what the agent sent it at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Vouched:
    """Every peer of the attempt was running it at this time, or later."""

    attempt: int
    at: float


ProcessEvent = StageStarted | SpawnFailed | WorkerEnded | TurnedCold | FirstOutput
RunEvent = ProcessEvent | RulesRead | WatchRead
"""Events of one attempt."""
MemberEvent = Registered | Arrived | Passed | Disconnected | FaultReported
"""Events of a process that may live on over attempts."""
OtherEvent = Prepared | Commanded | NothingLives | PortFound | Terminated | CheckpointsTold | Tick
LeaseEvent = Renewed | Vouched
AgentEvent = RunEvent | MemberEvent | LeaseEvent | OtherEvent


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the stage's workers: `nproc` for training, one for a script.  Answer: `StageStarted`
    or `SpawnFailed`."""

    stage: ProgramStage
    command: StartCommand
    kept: tuple[int, ...] = ()
    """Local ranks whose processes live on and are this attempt's from now on; in increasing order,
    as everywhere here."""


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send to the process group of every worker that lives."""

    signal: int


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that descends from a worker, until none is left.  Answer: `WorkerEnded`
    for each worker that lived, then `NothingLives`; at once where nothing lives."""

    kept: tuple[int, ...] = ()
    """Local ranks of training workers that are spared, with what descends from them."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Tell workers to leave their training and come to the barrier."""

    local_ranks: tuple[int, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class ReleaseWorkers:
    """Let workers at the barrier go on, as ranks of this attempt."""

    local_ranks: tuple[int, ...]
    command: StartCommand


@dataclass(frozen=True, slots=True)
class OfferPort:
    """Find a free port for the store of the next attempt.  Answer: `PortFound`."""

    used: int | None = None
    """Port of the store of the attempt that starts, which the operator may have chosen itself. Its
    store does not listen yet, so that the port looks free. None: no attempt starts."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell everyone who listens; the newest replaces the older ones that are still unsent."""

    report: AgentReport


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent's process; nothing of it lives any more."""

    code: int


@dataclass(frozen=True, slots=True)
class HoldLease:
    """Let the keeper end everything soon after this time, on the agent's clock, unless another time
    is told before; None: no worker lives."""

    until: float | None


WorkerEffect = Spawn | SignalWorkers | KillAll | Recall | ReleaseWorkers
AgentEffect = WorkerEffect | OfferPort | Publish | Exit | HoldLease
