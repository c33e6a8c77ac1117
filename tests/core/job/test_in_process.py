"""In-process restarts: the conditions for them, and the reports on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, restart, running, spec
from unbroken.core.job.events import AgentReported, StartWorkers, StopWorkers
from unbroken.spec.job.types import RunPolicy
from unbroken.wire.agent import AgentReport, AgentState


@pytest.mark.parametrize(
    ("told", "then", "again", "keep"),
    [
        ("", "", "", ""),
        ("", "trains=10.25", "", " keep"),
        # A line at the start is no progress.
        ("", "output=10.25", "", ""),
        # If steps are reported, nothing less counts as progress, and no rank fails twice at one
        # step.
        ("told=7", "output=10.25", "", ""),
        ("told=7", "told=5", "told=9", " keep"),
        ("told=7", "told=5", "told=7", ""),
    ],
)
def test_what_fails_again_keeps_its_process_only_after_progress(
    told: str, then: str, again: str, keep: str
) -> None:
    script = running(2, 0, f"5 runs w-0 0 {told}")
    restart(script, 10.0, 0, then=then)
    if again:
        script.run(f"15 runs w-0 1 {again}")
    first = "" if script.incidents[1].outcome else ", incident 1 failed again"
    script.run(f"""
        20 failed w-1 1 -> stop w-0 w-1 in 1{keep}, status Faulted 2,
            event Faulted{first}, incident 2 open
    """)


def test_two_faults_of_one_attempt_are_no_repetition() -> None:
    script = running()
    script.run("10 failed w-1 0\n10.1 ready w-0 0 kept=0")
    successor = script.successor(11.0)
    successor.run("11 ready w-0 0 kept=0\n11 failed w-1 0 rank=1\n11 synced")
    assert [e.command.restart_mode for e in stops(successor)] == ["in_process_restart"]


def test_many_agents_are_given_time_before_they_are_told_again() -> None:
    script = running(3000)
    script.run("10 failed w-1 0")
    assert len(stops(script)) == 3000
    script.run("12.9 tick")
    assert len(stops(script)) == 3000
    script.run("13.1 tick")
    assert len(stops(script)) == 6000


def test_the_last_restart_of_the_budget_makes_all_pods_anew_or_ends_the_job() -> None:
    policy = RunPolicy(job_max_retry_count=3)
    script = running(2, 0, "5 runs w-0 0 told=1", policy=policy)
    for attempt in range(3):
        restart(script, 10.0 + attempt, attempt, then=f"told={attempt + 1}")
        script.run(f"{10.5 + attempt} runs w-0 {attempt + 1} told={attempt + 5}")
    script.run("""
        20 failed w-1 3 -> stop w-0 w-1 in 3 gently, status Faulted 3, event Faulted,
                incident 4 open
    """)


def stops(script: Script) -> list[StopWorkers]:
    """Return all ordered stops."""
    return [effect for effect in script.effects if isinstance(effect, StopWorkers)]


@pytest.mark.parametrize(
    "mode", ["in_process_restart", "process_level_restart", ""], ids=["in-process", "process", "-"]
)
def test_a_stock_agent_is_told_what_it_was_started_for(mode: str) -> None:
    script = Script(spec(1))
    script.run("0 job\n0 synced\n0 pod w-0 node=n0")
    uid = script.views["w-0"].uid
    for at, state in enumerate((AgentState.READY, AgentState.RUNNING, AgentState.FAULTED), 1):
        script.give(AgentReported(uid, AgentReport("stock-1", state, restart_mode=mode)), at)
    assert [e.command.restart_mode for e in stops(script)] == [mode or "process_level_restart"]


STOCK = AgentReport("", AgentState.INIT, restart_mode="in_process_restart")


def stock(script: Script, now: float, agent: str, *states: AgentState) -> None:
    """Report states of a stock agent for in-process restart, known by the time of its INIT."""
    for state in states:
        report = replace(STOCK, agent_id=agent, state=state)
        script.give(AgentReported(script.views["w-0"].uid, report), now)


def running_stock() -> Script:
    """Return one pod with such an agent, which runs attempt 0."""
    script = Script(spec(1))
    script.run("0 job\n0 synced\n0 pod w-0 node=n0")
    stock(script, 1.0, "first", AgentState.READY, AgentState.RUNNING)
    return script


def test_a_stock_agent_that_restarts_its_processes_as_told_is_not_lost() -> None:
    script = running_stock()
    stock(script, 5.0, "first", AgentState.FAULTED)
    script.run("6 tick")
    count = len(stops(script))
    stock(script, 6.5, "second", AgentState.INIT, AgentState.READY)
    assert [signal.fault for signal in script.incidents[1].signals] == ["WorkerCrash"]
    assert len(stops(script)) == count
    starts = [e.command.attempt for e in script.effects if isinstance(e, StartWorkers)]
    assert starts == [0, 1]


@pytest.mark.parametrize("is_in_process", [True, False])
def test_a_stock_agent_that_restarts_in_process_gets_all_addresses_at_every_start(
    is_in_process: bool,
) -> None:
    mode = "in_process_restart" if is_in_process else "process_level_restart"
    script = Script(spec(2))
    script.run("0 job\n0 synced\n0 pod w-0 node=n0\n0 pod w-1 node=n1")
    states = (AgentState.READY, AgentState.RUNNING, AgentState.FAULTED, AgentState.READY)
    for at, state in enumerate(states, 1):
        for name in ("w-0", "w-1"):
            uid = script.views[name].uid
            report = replace(STOCK, agent_id=name, state=state, restart_mode=mode)
            script.give(AgentReported(uid, report), at)
    sent = [e.command for e in script.effects if isinstance(e, StartWorkers)]
    addresses = tuple((rank, script.views[f"w-{rank}"].address) for rank in (0, 1))
    expected = {(n, str(n), addresses) if is_in_process else (n, None, None) for n in (0, 1)}
    assert {(one.attempt, one.ip_version, one.rank_ips) for one in sent} == expected
