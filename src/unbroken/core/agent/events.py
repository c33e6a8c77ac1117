"""Events, orders and settings of the agent's machine (`machine`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from unbroken.core.tick import Tick
from unbroken.wire.agent import AgentReport, Command, RuleView, StartCommand, StopCommand
from unbroken.wire.observation import RankWatch

from .faults import SIGKILL, SIGTERM, SIGUSR1, WorkerEnd

if TYPE_CHECKING:
    # If a job has no rules, the agent does not load their evaluator.
    from unbroken.core.logs.rule_events import RuleViolated

SAVE_SECONDS = 2.0
"""Longest wait for the end of a step before a planned move; a longer step is interrupted."""


class ProgramStage(Enum):
    """The programs of an attempt, in order; values are prefixes of log directories."""

    PRE_TRAIN = "pre_train"
    TRAIN = "train"
    POST_TRAIN = "post_train"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that the agent was started with."""

    agent_id: str
    nproc: int
    nnodes: int = 1
    """Number of nodes at the agent's start; each attempt has its own number."""
    pid: int | None = None
    has_pre_train: bool = False
    has_post_train: bool = False
    stop_signal: int = SIGKILL
    """Signal for a stop that is not graceful: SIGKILL or SIGTERM."""
    has_elastic_events: bool = False
    """The script takes SIGUSR1, HyperPod's elastic event, as the request to save and end."""
    shutdown_timeout_seconds: float = 15.0
    """Seconds from the signal that requests the end to SIGKILL, if the command names no time."""
    agent_version: str = ""
    is_inprocess: bool = False
    """`--inprocess-restart`: workers wait for their ranks at the barrier before each attempt."""
    has_keeper: bool = True
    """A keeper ends the workers with their lease, if the agent cannot. False: they have no
    lease."""
    arrive_seconds: float = 5.0
    """Seconds from the order to leave the training to SIGKILL of workers not at the barrier."""

    def signal_of(self, command: StopCommand) -> int:
        """Return the first signal of a stop to workers that cannot keep their process."""
        if not command.is_graceful:
            return self.stop_signal
        return SIGUSR1 if self.has_elastic_events else SIGTERM

    def save_seconds(self, command: StopCommand) -> float:
        """Return the time for workers to end and save their step before they are made to leave."""
        return min(SAVE_SECONDS, self.arrive_seconds / 2) if command.is_graceful else 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The agent listens; a start command may follow."""


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command of an operator, or of any other holder of the job's key."""

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
    """`cold` or `warm`, for each worker; empty: not known."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A worker could not be started; those before it may run."""

    attempt: int
    stage: ProgramStage
    local_rank: int
    message: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker's own process ended; processes that it started may still be alive."""

    attempt: int
    stage: ProgramStage
    local_rank: int
    end: WorkerEnd
    step: int | None = None
    """Newest step that the worker had reported."""
    at: float | None = None
    """Time at which the end was seen; its last output is read after that. None: just now."""
    is_signalled: bool = True
    """The agent had sent the worker a signal before, which may have killed it."""
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
    """A worker of the training stage wrote its first byte of output."""

    attempt: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class RecurringLine:
    """A worker wrote a line of a kind that recurs in training (`core.agent.recurring_lines`)."""

    attempt: int
    local_rank: int
    at: float
    """Time of the first such line in the attempt; it may be long ago."""


@dataclass(frozen=True, slots=True)
class RulesRead:
    """Result of the log rules for the output read so far."""

    attempt: int
    views: tuple[RuleView, ...]
    violations: tuple[RuleViolated, ...] = ()
    """New violations, in order."""


@dataclass(frozen=True, slots=True)
class WatchRead:
    """Result of the watchdog for the training workers."""

    attempt: int
    views: tuple[RankWatch, ...]


@dataclass(frozen=True, slots=True)
class NothingLives:
    """Answer to `KillAll`: no process that descends from any worker is alive, except those of kept
    workers."""

    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker announces that it can leave its training on request."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """Attempt of the worker; see `Arrived`."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker has left its training, and waits at the barrier."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """Attempt that the worker has left; None: not reported, as by stock clients."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A worker has taken over the values that it was released with, and trains."""

    local_rank: int
    pid: int
    attempt: int | None = None
    """Attempt of the worker; see `Arrived`."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A worker can no longer receive orders, or can no longer leave its training."""

    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class FaultReported:
    """A worker reports that its training has failed."""

    local_rank: int
    pid: int
    restart_mode: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointsReported:
    """Checkpoints that are complete on this node, in the form of `/status`."""

    progress: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PortFound:
    """Answer to `OfferPort`: a free port, never offered before by this agent, nor used."""

    port: int


@dataclass(frozen=True, slots=True)
class Terminated:
    """The agent itself received SIGTERM, SIGINT or a similar signal."""

    signal: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The operator has answered a message that the agent sent at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Vouched:
    """Every peer of the attempt was running it at this time, or later."""

    attempt: int
    at: float


OutputEvent = FirstOutput | RecurringLine
ProcessEvent = StageStarted | SpawnFailed | WorkerEnded | TurnedCold | OutputEvent
RunEvent = ProcessEvent | RulesRead | WatchRead
"""Events of one attempt."""
MemberEvent = Registered | Arrived | Passed | Disconnected | FaultReported
"""Events of a process that may be kept over attempts."""
OtherEvent = (
    Prepared | Commanded | NothingLives | PortFound | Terminated | CheckpointsReported | Tick
)
LeaseEvent = Renewed | Vouched
AgentEvent = RunEvent | MemberEvent | LeaseEvent | OtherEvent


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the stage's workers: `nproc` for training, one for a script.  Answer: `StageStarted`
    or `SpawnFailed`."""

    stage: ProgramStage
    command: StartCommand
    kept: tuple[int, ...] = ()
    """Local ranks whose processes are kept and belong to this attempt from now on; in increasing
    order, as everywhere here."""


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Send a signal to the process group of every living worker."""

    signal: int


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that descends from a worker, until none is left.

    Answer: `WorkerEnded` for each worker that was alive, then `NothingLives`; at once if nothing
    was alive.
    """

    kept: tuple[int, ...] = ()
    """Local ranks of training workers that are spared, with their descendants."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Request workers to leave their training and come to the barrier."""

    local_ranks: tuple[int, ...]
    attempt: int
    save_seconds: float = 0.0
    """Seconds in which a worker may end and save its step, and leave by itself; 0: it is made to
    leave at once."""


@dataclass(frozen=True, slots=True)
class ReleaseWorkers:
    """Release workers at the barrier, as ranks of this attempt."""

    local_ranks: tuple[int, ...]
    command: StartCommand


@dataclass(frozen=True, slots=True)
class OfferPort:
    """Find a free port for the store of the next attempt.  Answer: `PortFound`."""

    used: int | None = None
    """Port of the store of the attempt that starts; the operator may have chosen it itself.

    Its store does not listen yet, so the port looks free. None: no attempt starts.
    """


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the report to every listener; the newest replaces older ones that are still unsent."""

    report: AgentReport


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent's process; none of its workers is alive any more."""

    code: int


@dataclass(frozen=True, slots=True)
class HoldLease:
    """Set the time, on the agent's clock, soon after which the keeper ends everything, unless a new
    time follows before; None: no worker is alive."""

    until: float | None


WorkerEffect = Spawn | SignalWorkers | KillAll | Recall | ReleaseWorkers
AgentEffect = WorkerEffect | OfferPort | Publish | Exit | HoldLease
