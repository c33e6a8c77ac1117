"""Adoption of a running job by a new operator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, left, running, spec
from unbroken.core.job.events import (
    AgentReported,
    IncidentSeen,
    PodUid,
    StartWorkers,
    StopWorkers,
)
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import JobStatus, RestartStatus, RunPolicy
from unbroken.wire.agent import AgentReport, AgentState


def test_attempt_that_ran_is_not_prepared_again_where_its_fault_was_never_written() -> None:
    old = running(1, policy=RunPolicy(job_max_retry_count=1))
    old.run("10 failed w-0 0\n11 ready w-0 0\n12 runs w-0 1")
    written = old.incidents[1]
    assert written.started_at == 12
    old.run("""
        20 shutdown w-0 1 -> stop w-0 in 1 gently, status Faulted 1, event Faulted,
            incident 1 failed again, incident 2 open
    """)
    new = Script(old.spec, old.status)
    new.give(IncidentSeen(written), 100)
    new.run("""
        100 job    ->
        100 synced -> create w-0, status Faulted 2, event Faulted, incident 1 failed again,
            incident 2 open
        101 pod w-0 node=n0
        102 ready w-0 -> status Faulted 2, ledger awaited, start w-0=0 in 2, status Faulted 2,
            incident 2 open
    """)
    assert new.incidents[1].ready_at == written.ready_at


@pytest.mark.parametrize(
    "heard",
    ["runs w-0 0 rank=0 told=12\n100.2 boots w-1 agent=other", "failed w-0 0 rank=0 told=12"],
    ids=["others run it", "it has failed"],
)
def test_progress_that_was_never_written_is_not_charged(heard: str) -> None:
    new = left(1 if heard.startswith("failed") else 2)
    new.job.state.set_status(restart_status=RestartStatus(restart_count=3))
    new.run(f"100 synced\n100.1 {heard}\n112 tick")
    incident = new.incidents[1]
    assert (incident.step, incident.remedy) == (12, Remedy.PROCESS)
    assert new.status.restart_status == RestartStatus()


@pytest.mark.parametrize("state", ["Completed", "Failed"])
def test_job_that_has_ended_is_only_cleaned_up(state: str) -> None:
    old = running(1)
    old.run("5 pod w-0 phase=Running\n10 completed w-0 0")
    old.successor(100).run("""
        100 synced -> delete w-0
        101 failed w-0 0 ->
        102 gone w-0 ->
    """)


def test_status_that_is_no_status_of_ours_is_no_reason_to_stop() -> None:
    script = Script(spec(1), JobStatus(restart_count=3))
    script.run("""
        0 job ->
        0 synced -> create w-0, status Created 3, event Created
        1 pod w-0 node=n0
        2 ready w-0 -> ledger awaited, start w-0=0 in 3, status PodsRunning 3
    """)


def test_stock_agents_get_no_port_that_an_older_attempt_had() -> None:
    """Offer no old port: attempt 0 may have had several, and the status has only the last."""
    stock = AgentReported(PodUid("w-0.0"), AgentReport("stock-w-0", AgentState.READY))
    old = Script(spec(1))
    old.run("0 job\n0 synced\n0 pod w-0 node=n0")
    old.give(stock, 1)
    first = int(old.status.master_port or 0)
    assert first
    status = replace(old.status, restart_count=1, master_port=str(first + 2))
    new = Script(old.spec, status)
    new.run("100 pod w-0 node=n0\n100 job\n100 synced")
    new.give(stock, 100)
    new.give(stock, 101)
    new.run("110 tick")
    assert new.status.master_port == str(first + 3)


def test_attempt_of_stock_agents_that_not_all_run_is_stopped() -> None:
    """Stop the attempt: a ready stock agent may have run it before, and been stopped."""
    old = Script()
    old.up("ready")
    for name in old.views:
        old.run(f"5 pod {name} phase=Running")
    new = old.successor(100)
    new.run("100 synced")
    effects = []
    for name, state in (("w-0", AgentState.RUNNING), ("w-1", AgentState.READY)):
        report = AgentReport(f"stock-{name}", state, rank=int(name[-1]))
        effects += new.give(AgentReported(new.views[name].uid, report), 100)
    both = {view.uid for view in new.views.values()}
    assert {e.pod for e in effects if isinstance(e, StopWorkers)} == both
    assert not any(isinstance(e, StartWorkers) for e in effects)


def test_the_rank_of_a_stock_agent_that_shuts_down_is_not_given_to_a_second_pod() -> None:
    """Its workers may not have ended yet, though nothing was written of their start."""
    new = Script(spec(1, 1), Script(spec(1, 1)).status)
    new.run("""
        100 pod w-0 node=n0 phase=Running
        100 pod w-1 node=n1 phase=Running
        100 job
        100 synced
    """)
    effects = []
    shutdown = AgentReport("stock-w-0", AgentState.SHUTDOWN, rank=0)
    ready = AgentReport("stock-w-1", AgentState.READY)
    for name, report in (("w-0", shutdown), ("w-1", ready)):
        effects += new.give(AgentReported(new.views[name].uid, report), 101)
    assert {e.pod for e in effects if isinstance(e, StopWorkers)} == {"w-0.0", "w-1.0"}
    assert not any(isinstance(e, StartWorkers) for e in effects)
