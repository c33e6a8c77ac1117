"""A stock agent (HyperPod agent 1.1.3, process-level mode): it knows no attempts and offers no
port.

It takes `/start` in READY whatever the attempt, and `/stop` in any state with workers. A command in
another state is ignored, but its rank is remembered all the same.
"""

from __future__ import annotations

from unbroken.core.agent import machine
from unbroken.core.agent.faults import WorkerEnd, has_failed
from unbroken.core.agent.machine import ProgramStage, Settings
from unbroken.wire.agent import AgentReport, AgentState, StartCommand, StopCommand

STOPPABLE = (AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED)


class StockWorkers:
    """Takes and gives what `core.agent.machine.Workers` does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = AgentState.INIT
        self._rank: int | None = None
        self._left: set[int] = set()
        self._published: AgentReport | None = None

    def deadline(self) -> float | None:
        """Time changes nothing."""
        return None

    def report(self) -> AgentReport:
        """Return the report of `/status`, as the operator reads it."""
        return AgentReport(f"stock-{self._settings.agent_id}", self._state, rank=self._rank)

    def step(self, event: machine.AgentEvent, now: float) -> list[machine.AgentEffect]:
        """Take one event; return what must be done."""
        effects = self._take(event)
        report = self.report()
        if report != self._published:
            self._published = report
            effects.append(machine.Publish(report))
        return effects

    def _take(self, event: machine.AgentEvent) -> list[machine.AgentEffect]:
        match event:
            case machine.Prepared():
                self._state = AgentState.READY
            case machine.Commanded(StartCommand() as command):
                return self._start(command)
            case machine.Commanded(StopCommand()):
                if self._state in STOPPABLE:
                    return self._kill(AgentState.STOPPING)
            case machine.Commanded() | machine.Terminated():
                return self._kill(AgentState.SHUTDOWN)
            case machine.SpawnFailed():
                return self._kill(AgentState.FAULTED)
            case machine.WorkerEnded(_, _, local_rank, end):
                return self._ended(local_rank, end)
            case machine.NothingLives():
                return self._nothing_lives()
            case _:
                pass
        return []

    def _kill(self, state: AgentState) -> list[machine.AgentEffect]:
        self._state = state
        return [machine.KillAll()]

    def _ended(self, local_rank: int, end: WorkerEnd) -> list[machine.AgentEffect]:
        self._left.discard(local_rank)
        if self._state is not AgentState.RUNNING:
            return []
        if has_failed(end):
            return self._kill(AgentState.FAULTED)
        if not self._left:
            self._state = AgentState.COMPLETED
        return []

    def _nothing_lives(self) -> list[machine.AgentEffect]:
        if self._state is AgentState.SHUTDOWN:
            return [machine.Exit(0)]
        if self._state is AgentState.STOPPING:
            self._state = AgentState.READY
        return []

    def _start(self, command: StartCommand) -> list[machine.AgentEffect]:
        self._rank = command.rank
        if self._state is not AgentState.READY:
            return []
        self._state = AgentState.RUNNING
        self._left = set(range(self._settings.nproc))
        return [machine.Spawn(ProgramStage.TRAIN, command)]
