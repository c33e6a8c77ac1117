"""The lease on an agent's workers: what the agent does when it runs out."""

from __future__ import annotations

from dataclasses import replace

from tests.core.agent.drive_workers import DONE, SETTINGS, ended, started
from unbroken.core.agent.events import (
    AgentEffect,
    Arrived,
    Commanded,
    KillAll,
    NothingLives,
    OfferPort,
    Prepared,
    ProgramStage,
    Registered,
    Renewed,
    Spawn,
    StageStarted,
    WorkerEnded,
)
from unbroken.core.agent.machine import Workers
from unbroken.core.tick import Tick
from unbroken.wire.agent import IN_PROCESS_RESTART, AgentState, StartCommand, StopCommand

LEASE = 8.0


def orders(effects: list[AgentEffect]) -> list[AgentEffect]:
    return [one for one in effects if isinstance(one, Spawn | KillAll | OfferPort)]


def test_a_start_that_waits_for_leftovers_is_not_followed_after_its_lease() -> None:
    machine = Workers(replace(SETTINGS, has_pre_train=True))
    for event in (
        Prepared(),
        Renewed(0.0),
        Commanded(StartCommand(0, 0, 2, "10.0.0.1", 2000, lease_seconds=LEASE)),
        StageStarted(0, ProgramStage.PRE_TRAIN, (99,)),
        WorkerEnded(0, ProgramStage.PRE_TRAIN, 0, DONE, pid=99),
        started(0, _0=100, _1=101),
        Registered(0, 100),
        Registered(1, 101),
        Commanded(StopCommand(0, restart_mode=IN_PROCESS_RESTART)),
        NothingLives((0, 1)),
        Arrived(0, 100),
        Arrived(1, 101),
        Commanded(StartCommand(1, 0, 2, "10.0.0.1", 2001, lease_seconds=LEASE)),
        StageStarted(1, ProgramStage.PRE_TRAIN, (200,)),
        ended(0, 100),
        WorkerEnded(1, ProgramStage.PRE_TRAIN, 0, DONE, pid=200),
    ):
        effects = machine.step(event, 1.0)
    assert orders(effects) == [KillAll((1,))], "what the worker has left behind goes first"
    assert orders(machine.step(Tick(), LEASE)) == [KillAll()]
    assert orders(machine.step(NothingLives(()), LEASE + 0.1)) == []
    assert machine.state is AgentState.READY
