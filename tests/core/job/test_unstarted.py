"""Workers that end before they were given a rank: a fault like any other, and charged like one."""

from __future__ import annotations

import pytest

from tests.core.agent.drive_workers import THEIRS
from tests.core.job.drive_job import begun
from unbroken.core.agent.events import (
    Commanded,
    KillAll,
    NothingLives,
    Prepared,
    ProgramStage,
    Publish,
    Spawn,
    StageStarted,
    WorkerEnded,
)
from unbroken.core.agent.faults import WorkerEnd
from unbroken.core.agent.machine import Workers
from unbroken.core.job.events import AgentReported, PodUid, StopWorkers
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import RunPolicy


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_the_budget_ends_the_job_with_the_reason(restarts: int) -> None:
    script = begun(policy=RunPolicy(job_max_retry_count=restarts))
    script.run("1 broke w-0 text=ImportError")
    for newest in range(restarts):
        script.run(f"{newest + 2} broke w-0 {newest} text=ImportError")
    script.run(f"9 ready w-0 {restarts}")
    assert script.condition.type == "Failed"
    assert script.condition.reason == "RetriesExhausted"
    assert "before its start: ImportError" in script.condition.message
    assert [one.remedy for one in script.incidents.values()][-1] is Remedy.FAIL


def test_a_worker_that_ends_without_an_error_is_told_what_it_lacks() -> None:
    machine = Workers(THEIRS)
    machine.step(Prepared(), 0.0)
    machine.step(StageStarted(0, ProgramStage.TRAIN, (100, 101)), 1.0)
    machine.step(WorkerEnded(0, ProgramStage.TRAIN, 1, WorkerEnd(0), pid=101), 2.0)
    (fault,) = machine.report().faults
    assert (fault.kind.value, fault.local_rank, fault.exit_code) == ("EarlyExit", 1, 0)
    assert "the script must wait for its rank" in fault.message


def test_operator_and_agent_come_to_an_end_together() -> None:
    """Connect both machines; the worker of the only pod ends at once, each time."""
    script = begun(policy=RunPolicy(job_max_retry_count=3))
    agent, now, pid, starts = Workers(THEIRS), 1.0, 100, 0
    todo = list(agent.step(Prepared(), now))
    while todo and starts < 20:
        now += 0.1
        match todo.pop(0):
            case Spawn(stage, command):
                starts, pid = starts + 1, pid + 2
                todo += agent.step(StageStarted(command.attempt, stage, (pid, pid + 1)), now)
                for local_rank in range(2):
                    end = WorkerEnded(
                        command.attempt, stage, local_rank, WorkerEnd(1), pid=pid + local_rank
                    )
                    todo += agent.step(end, now)
            case KillAll(kept):
                todo += agent.step(NothingLives(kept), now)
            case Publish(report):
                effects = script.give(AgentReported(PodUid("w-0.0"), report), now)
                for order in effects:
                    if isinstance(order, StopWorkers):
                        todo += agent.step(Commanded(order.command), now)
            case _:
                pass
    script.run(f"{now + 70} tick")
    assert script.condition.type == "Failed"
    assert len(script.incidents) == 4
