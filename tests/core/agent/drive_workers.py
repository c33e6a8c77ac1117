"""Scripts for the agent's machine: its events and its effects, in short words."""

from __future__ import annotations

from dataclasses import replace

from unbroken.core.agent.events import (
    AgentEffect,
    AgentEvent,
    Arrived,
    Commanded,
    Disconnected,
    Exit,
    KillAll,
    NothingLives,
    OfferPort,
    Prepared,
    ProgramStage,
    Publish,
    Recall,
    Registered,
    ReleaseWorkers,
    Settings,
    SignalWorkers,
    Spawn,
    StageStarted,
    WorkerEnded,
)
from unbroken.core.agent.faults import WorkerEnd
from unbroken.core.agent.machine import Workers
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    StartCommand,
    StopCommand,
)

SETTINGS = Settings("agent", nproc=2)
THEIRS = replace(SETTINGS, is_inprocess=True, arrive_seconds=60.0)
KILLED, CRASHED, DONE = WorkerEnd(signal=9), WorkerEnd(exit_code=1), WorkerEnd(exit_code=0)
Step = tuple[AgentEvent, str]


def start(attempt: int, rank: int = 0) -> AgentEvent:
    """Return the start of one of two nodes."""
    return Commanded(StartCommand(attempt, rank, 2, "10.0.0.1", 2000 + attempt))


def keep(attempt: int | None = 0, *, is_graceful: bool = False) -> AgentEvent:
    return Commanded(StopCommand(attempt, IN_PROCESS_RESTART, is_graceful))


def stop(attempt: int | None = 0, mode: str = "process_level_restart") -> AgentEvent:
    return Commanded(StopCommand(attempt, restart_mode=mode))


def started(attempt: int, **pids: int) -> AgentEvent:
    """Return the started processes by local rank: `_0=100`."""
    ranks = tuple(int(name[1:]) for name in pids)
    return StageStarted(attempt, ProgramStage.TRAIN, tuple(pids.values()), ranks)


def ended(local_rank: int, pid: int, end: WorkerEnd = KILLED, attempt: int = 0) -> AgentEvent:
    return WorkerEnded(attempt, ProgramStage.TRAIN, local_rank, end, pid=pid)


def short(effect: AgentEffect) -> str:
    match effect:
        case Spawn(stage, command, kept):
            return f"spawn {stage.value} {command.attempt}" + _but(kept)
        case SignalWorkers(number):
            return f"signal {number}"
        case KillAll(kept):
            return "kill" + _but(kept)
        case Recall(ranks, attempt, seconds):
            after = f" within {seconds:g}" if seconds else ""
            return f"recall {_list(ranks)} of {attempt}" + after
        case ReleaseWorkers(ranks, command):
            return f"release {_list(ranks)} into {command.attempt}"
        case OfferPort():
            return "port"
        case Publish(report):
            return f"say {report.state.value}"
        case Exit(code):
            return f"exit {code}"


def _list(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))


def _but(kept: tuple[int, ...]) -> str:
    return f" but {_list(kept)}" if kept else ""


def check(*steps: Step, settings: Settings = SETTINGS, with_reports: bool = False) -> Workers:
    """Give a machine the events, one a second, and compare its effects.

    After its orders comes its state. `with_reports`: in its place, each report.
    """
    machine = Workers(settings)
    machine.step(Prepared(), 0.0)
    for second, (event, expected) in enumerate(steps, 1):
        effects = machine.step(event, float(second))
        found = [short(one) for one in effects if with_reports or not isinstance(one, Publish)]
        found += [] if with_reports else [machine.state.value]
        assert ", ".join(found) == expected, f"step {second}: {event}"
    return machine


RUNNING: tuple[Step, ...] = (
    (start(0), "spawn train 0, port, running"),
    (started(0, _0=100, _1=101), "running"),
    (Registered(0, 100), "running"),
    (Registered(1, 101), "running"),
)
FAULTED: tuple[Step, ...] = (
    *RUNNING,
    (Disconnected(0, 100), "running"),
    (ended(0, 100), "kill but 1, faulted"),
    (NothingLives((1,)), "faulted"),
)
READY: tuple[Step, ...] = (
    *FAULTED,
    (keep(), "recall 1 of 0, kill but 1, stopping"),
    (NothingLives((1,)), "stopping"),
    (Arrived(1, 101), "ready"),
)
AGAIN: tuple[Step, ...] = (
    *READY,
    (start(1), "spawn train 1 but 1, release 1 into 1, port, running"),
    (started(1, _0=102), "running"),
)
