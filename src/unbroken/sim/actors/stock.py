"""A stock agent (HyperPod agent 1.1.3): it knows no attempts and offers no port.

It takes `/start` in READY whatever the attempt, and `/stop` in any state with workers. A command in
another state is ignored, but its rank is remembered all the same.

For in-process restart, workers that wait for their rank may end, which it reports. After a stop it
starts others, and is known by another name: the time at which it did.
"""

from __future__ import annotations

from collections.abc import Callable

from unbroken.core.agent import events
from unbroken.core.agent.events import ProgramStage, Settings
from unbroken.core.agent.faults import WorkerEnd, has_failed
from unbroken.core.tick import Tick
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    AgentReport,
    AgentState,
    StartCommand,
    StopCommand,
)

STOPPABLE = (AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED)


class StockWorkers:
    """Takes and gives what `core.agent.machine.Workers` does."""

    def __init__(self, settings: Settings, lives: Callable[[], float | None] | None = None) -> None:
        """`lives`: seconds until a worker that waits for its rank ends, None if none does; None: no
        worker waits, for the agent is for process-level restart."""
        self._settings = settings
        self._lives = lives
        self._ends_at: float | None = None
        self._is_unstarted = False
        self._generation = 0
        """Times that workers were started to wait."""
        self._state = AgentState.INIT
        self._rank: int | None = None
        self._left: set[int] = set()
        self._published: AgentReport | None = None

    def deadline(self) -> float | None:
        """Return when a worker that waits for its rank ends."""
        return self._ends_at

    def report(self) -> AgentReport:
        """Return the report of `/status`, as the operator reads it."""
        name = f"stock-{self._settings.agent_id}"
        if self._lives is None:
            return AgentReport(name, self._state, rank=self._rank)
        return AgentReport(
            f"{name}-{self._generation}",
            self._state,
            rank=self._rank,
            restart_mode=IN_PROCESS_RESTART,
            is_unstarted=self._is_unstarted,
        )

    def step(self, event: events.AgentEvent, now: float) -> list[events.AgentEffect]:
        """Take one event; return what must be done."""
        effects = self._take(event, now)
        report = self.report()
        if report != self._published:
            self._published = report
            effects.append(events.Publish(report))
        return effects

    def _take(self, event: events.AgentEvent, now: float) -> list[events.AgentEffect]:
        match event:
            case events.Prepared():
                self._wait(now)
            case Tick():
                self._pass_time(now)
            case events.Commanded(StartCommand() as command):
                return self._start(command)
            case events.Commanded(StopCommand()):
                if self._state in STOPPABLE:
                    return self._kill(AgentState.STOPPING)
            case events.Commanded() | events.Terminated():
                return self._kill(AgentState.SHUTDOWN)
            case events.SpawnFailed():
                return self._kill(AgentState.FAULTED)
            case events.WorkerEnded(_, _, local_rank, end):
                return self._ended(local_rank, end)
            case events.NothingLives():
                return self._nothing_lives(now)
            case _:
                pass
        return []

    def _wait(self, now: float) -> None:
        """Be ready for a start."""
        self._state, self._is_unstarted = AgentState.READY, False
        self._generation += 1
        lived = self._lives() if self._lives is not None else None
        self._ends_at = None if lived is None else now + lived

    def _pass_time(self, now: float) -> None:
        if self._ends_at is not None and now >= self._ends_at:
            self._state, self._ends_at, self._is_unstarted = AgentState.FAULTED, None, True

    def _kill(self, state: AgentState) -> list[events.AgentEffect]:
        self._state = state
        return [events.KillAll()]

    def _ended(self, local_rank: int, end: WorkerEnd) -> list[events.AgentEffect]:
        self._left.discard(local_rank)
        if self._state is not AgentState.RUNNING:
            return []
        if has_failed(end):
            return self._kill(AgentState.FAULTED)
        if not self._left:
            self._state = AgentState.COMPLETED
        return []

    def _nothing_lives(self, now: float) -> list[events.AgentEffect]:
        if self._state is AgentState.SHUTDOWN:
            return [events.Exit(0)]
        if self._state is AgentState.STOPPING:
            self._wait(now)
        return []

    def _start(self, command: StartCommand) -> list[events.AgentEffect]:
        self._rank = command.rank
        if self._state is not AgentState.READY:
            return []
        self._state, self._ends_at = AgentState.RUNNING, None
        self._left = set(range(self._settings.nproc))
        return [events.Spawn(ProgramStage.TRAIN, command)]
