"""Takeovers by a new operator, which must repeat, forget and overlook nothing.

They are scripts of worlds that once failed.
"""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import Script, left, running, spec
from unbroken.core.job.events import (
    AgentReported,
    IncidentSeen,
    StartWorkers,
    StopWorkers,
    WriteIncident,
)
from unbroken.core.job.recovery.incidents import INCIDENTS_MAX
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import RunPolicy
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import AgentReport, AgentState

MANY = RunPolicy(job_max_retry_count=9)
ERROR = "kind=PythonException text=ValueError:bad print=f1 lines=Traceback|ValueError:bad"


def forget_incidents(script: Script) -> None:
    """Discard the writes that were to follow the status."""
    script.effects = [one for one in script.effects if not isinstance(one, WriteIncident)]


@pytest.mark.parametrize("state", ["phase=Failed", "phase=Failed deleting"])
def test_a_failed_pod_is_charged_once_though_its_incident_was_never_written(state: str) -> None:
    old = running(1, 1, policy=RunPolicy(job_max_retry_count=1))
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    old.run("10 pod w-0 phase=Failed why=Error")
    old.run(f"10 pod w-0 {state}")
    forget_incidents(old)
    new = old.successor(100)
    new.run("100 synced")
    new.run("100 ready w-1\n101 ready w-1 0")
    new.run("102 gone w-0 -> create w-0\n104 tick -> start w-1=0 in 1, status PodsRunning 1")
    assert new.incidents == {}
    assert new.status.restart_status is not None
    assert new.status.restart_status.restart_count == 1


def test_a_start_of_the_operator_before_that_arrives_late_is_joined() -> None:
    new = left(2, 0, "10 failed w-1 0\n10.1 ready w-0 0\n10.1 ready w-1 0", policy=MANY)
    new.run("""
        100 synced                     ->
        100 ready w-0 0 rank=0         ->
        101 lost w-1                   ->
        111 tick                       ->
        111.1 runs w-0 1 rank=0 master=a port=5 -> stop w-0 in 1, status Faulted 2, ledger
    """)
    assert new.job.attempt == 2, "nobody knows what the agent that is away runs"
    new = left(1, 1, "10 failed w-0 0\n10.1 ready w-0 0", policy=MANY)
    new.run("""
        100 synced                              ->
        100 ready w-1                           ->
        100 ready w-0 0 rank=0                  -> stop w-1 in 0 keep
        100.1 runs w-0 1 rank=0 master=a port=5 -> status Running 1, event Running, incident 1 open
        100.2 ready w-1 0                       ->
    """)
    assert new.status.master_port == "5"


def test_an_end_that_was_decided_is_carried_out_for_its_reason() -> None:
    script = ""
    for at, attempt in ((10, 0), (20, 1), (30, 2)):
        script += f"""
            {at} failed w-0 {attempt} {ERROR}
            {at}.1 ready w-0 {attempt}
            {at}.2 runs w-0 {attempt + 1}
        """
    old = running(1, policy=RunPolicy(job_max_retry_count=9))
    old.run("5 pod w-0 phase=Running")
    old.run("\n".join(script.splitlines()[:-3]))
    new = old.successor(100)
    assert old.incidents[3].remedy is Remedy.FAIL
    new.run("100 synced\n110 tick ->")
    assert new.job.phase.value == "Ending"
    new.run("""
        111 ready w-0 2 -> status Failed 2, event Failed, incident 3 SameErrorSameStep, delete w-0
    """)
    assert new.condition.reason == "SameErrorSameStep"


def test_stock_agents_that_are_being_stopped_are_not_stopped_again() -> None:
    old = Script()
    old.up("ready")
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
        stock(old, name, AgentState.RUNNING, 6)
    stock(old, "w-0", AgentState.FAULTED, 10)
    assert old.status.restart_count == 1
    forget_incidents(old)
    new = old.successor(100)
    new.run("100 synced")
    for name in new.views:
        stock(new, name, AgentState.STOPPING, 100)
    assert not any(isinstance(e, StopWorkers) and e.command.attempt == 1 for e in new.effects)
    for name in new.views:
        stock(new, name, AgentState.READY, 101)
    started = {e.command.attempt for e in new.effects if isinstance(e, StartWorkers)}
    assert started == {1}


def test_a_fault_of_stock_agents_is_charged_once_though_its_incident_is_lost() -> None:
    """The incident before it is still open."""
    old = running_stock_agents(3)
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    stock(old, "w-0", AgentState.FAULTED, 10)
    for state, at in ((AgentState.READY, 11), (AgentState.RUNNING, 12)):
        for name in ("w-0", "w-1", "w-2")[: 3 if state is AgentState.READY else 2]:
            stock(old, name, state, at)
    first = old.incidents[1]
    assert first.ready_at is not None
    old.run("13 pod w-2 phase=Failed why=Error")
    assert old.status.restart_count == 2
    new = old.successor(100, is_incident_written=False)
    new.give(IncidentSeen(first), 100)
    new.run("100 synced")
    stock(new, "w-0", AgentState.RUNNING, 100)
    stock(new, "w-1", AgentState.RUNNING, 100)
    assert new.status.restart_count == 2
    assert ("w-0.0", 1) in stops(new)


def test_a_stock_agent_that_follows_an_old_start_while_the_job_is_halted_is_stopped() -> None:
    script = running_stock_agents(2)
    script.run("10 lost w-0")
    stock(script, "w-1", AgentState.READY, 10.1)
    stock(script, "w-1", AgentState.RUNNING, 20, "again")
    assert stops(script)[-1] == ("w-1.0", 0)
    stock(script, "w-0", AgentState.READY, 21, "again")
    assert 1 not in starts(script)
    stock(script, "w-1", AgentState.READY, 22, "again")
    assert starts(script).count(1) == 2


def test_a_stock_spare_that_follows_an_old_start_is_stopped() -> None:
    script = running_stock_agents(2, 1)
    stock(script, "w-2", AgentState.RUNNING, 20)
    assert stops(script) == [("w-2.0", 0)]


def running_stock_agents(replicas: int, spares: int = 0) -> Script:
    """Return a job whose stock agents run attempt 0."""
    script = Script(spec(replicas, spares))
    script.run("0 job\n0 synced")
    for number in range(replicas + spares):
        script.run(f"0 pod w-{number} node=n{number}")
        stock(script, f"w-{number}", AgentState.READY, 1)
    for number in range(replicas):
        stock(script, f"w-{number}", AgentState.RUNNING, 4)
    return script


def stops(script: Script) -> list[tuple[str, int | None]]:
    """Return the pod and the attempt of each order to stop."""
    return [(e.pod, e.command.attempt) for e in script.effects if isinstance(e, StopWorkers)]


def starts(script: Script) -> list[int]:
    """Return the attempt of each order to start."""
    return [e.command.attempt for e in script.effects if isinstance(e, StartWorkers)]


def stock(script: Script, name: str, state: AgentState, now: float, agent: str = "first") -> None:
    """Report the state of a stock agent; `agent` names its process."""
    report = AgentReport(f"stock-{name}-{agent}", state, rank=int(name[-1]))
    script.give(AgentReported(script.views[name].uid, report), now)


def test_a_new_operator_charges_no_restart_that_cost_nothing_and_is_no_longer_told() -> None:
    script = running(policy=RunPolicy(job_max_retry_count=1))
    script.run("5 pod w-0 phase=Running\n5 pod w-1 phase=Running")
    for attempt in range(INCIDENTS_MAX + 5):
        at = 10.0 * (attempt + 1)
        script.run(f"{at} job restart={at}")
        script.run(f"{at + 1} ready w-0 {attempt}\n{at + 1} ready w-1 {attempt}\n{at + 3} tick")
        script.run_ordered(at + 4)
        script.run(f"{at + 5} runs w-0 {attempt + 1} told=5")
    new = script.successor(10_000)
    new.run(f"""
        10000 synced
        10000 runs w-0 {INCIDENTS_MAX + 5} rank=0
        10000 runs w-1 {INCIDENTS_MAX + 5} rank=1
        10001 failed w-1 {INCIDENTS_MAX + 5}
    """)
    assert new.condition.type == ConditionType.FAULTED.value
    assert new.status.restart_count == INCIDENTS_MAX + 6
