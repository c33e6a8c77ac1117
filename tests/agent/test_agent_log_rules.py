"""Log rules of an attempt, in virtual time: what the operator is told of the workers' output.

test_agent_log_rules_processes.py reads the output of real workers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.agent.running import start, stop
from tests.agent.virtual_agents import agent
from tests.virtual_time import in_virtual_time
from unbroken.agent.options import Script
from unbroken.core.agent.faults import WorkerEnd
from unbroken.wire.agent import AgentReport, AgentState, FaultKind, RuleState, RuleView

LOSS: dict[str, Any] = {"name": "loss", "logPattern": r".*loss=(\S+)"}
DONE = WorkerEnd(exit_code=0)


def the_fault(report: AgentReport) -> tuple[str, int, str]:
    """Return reason, rank, and text of the only fault."""
    (fault,) = report.faults
    assert (report.state, fault.kind) == (AgentState.FAULTED, FaultKind.LOG_RULE)
    assert fault.message.startswith(f"{report.reason}: ")
    assert report.message.startswith(fault.message)
    return report.reason, fault.rank, fault.message


def the_view(report: AgentReport) -> RuleView:
    """Return the only rule."""
    (view,) = report.log_rules
    return view


@in_virtual_time
async def test_silence_after_the_last_line_is_a_hang() -> None:
    rule = {**LOSS, "expectedRecurringFrequencyInSeconds": 20}
    async with agent() as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        for _ in range(3):
            await asyncio.sleep(19)
            one.workers.write(0, "loss=1.5\n")
        report = await operator.state(AgentState.RUNNING)
        assert report.faults == ()
        one.workers.write(1, "loss=2.5\n")
        last_at = asyncio.get_running_loop().time()
        await asyncio.sleep(21)
        report = await operator.state(AgentState.FAULTED)
    reason, rank, message = the_fault(report)
    assert (reason, rank) == ("LogHang_loss", 1)
    assert "no match for 20 s; last on rank 1" in message
    assert [worker.state for worker in report.workers] == ["running", "running"]
    view = the_view(report)
    assert (view.state, view.matches, view.last_match_at) == (RuleState.HANGING, 4, last_at)
    assert report.faults[0].at == last_at + 20


@in_virtual_time
async def test_a_worker_that_never_logs_is_a_hang_at_the_cut_off() -> None:
    rule = {**LOSS, "expectedStartCutOffInSeconds": 60}
    async with agent(1) as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        await asyncio.sleep(61)
        report = await operator.state(AgentState.FAULTED)
    reason, _, message = the_fault(report)
    assert (reason, "since the start" in message) == ("LogHang_loss", True)
    assert report.faults[0].at == report.workers[0].started_at + 60


@in_virtual_time
async def test_a_rank_that_must_log_and_does_not_is_named() -> None:
    rule = {**LOSS, "ranks": "every", "expectedStartCutOffInSeconds": 60}
    async with agent() as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        for _ in range(7):
            one.workers.write(0, "loss=1\n")
            await asyncio.sleep(9)
        assert the_fault(await operator.state(AgentState.FAULTED))[:2] == ("LogHang_loss", 1)


@in_virtual_time
async def test_bad_values_in_a_row_are_slow() -> None:
    rule = {**LOSS, "metricThreshold": 5, "operator": "gt", "metricEvaluationDataPoints": 2}
    async with agent(1) as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        for value in (9, 1, 9, 9):
            one.workers.write(0, f"loss={value}\n")
        report = await operator.state(AgentState.FAULTED)
    assert the_fault(report)[0] == "LogSlow_loss"
    assert (the_view(report).bad_points, the_view(report).last_value) == (2, "9")


@in_virtual_time
async def test_half_a_line_waits_for_its_end() -> None:
    rule = {**LOSS, "metricThreshold": 50, "operator": "lt", "metricEvaluationDataPoints": 2}
    async with agent(1) as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        for text in ("step 1 lo", "ss=1", "00\n", "done loss=7\n"):
            one.workers.write(0, text)
            await asyncio.sleep(10)
        one.workers.end(0, DONE)
        view = the_view(await operator.state(AgentState.COMPLETED))
    assert (view.matches, view.bad_points, view.last_value) == (2, 1, "7")


@in_virtual_time
async def test_a_job_that_logs_in_time_is_left_alone() -> None:
    rules = [
        {**LOSS, "ranks": "every", "expectedStartCutOffInSeconds": 20},
        {**LOSS, "name": "often", "expectedRecurringFrequencyInSeconds": 6},
        {**LOSS, "name": "high", "metricThreshold": 5, "operator": "gt"},
    ]
    async with agent() as one, one.operator() as operator:
        operator.send(start(log_rules=rules))
        await operator.workers(0)
        for step in range(20):
            for rank, stream in enumerate(("stdout", "stderr")):
                padding = "x" * 70_000 if step % 5 == 0 else ""
                one.workers.write(rank, f"{padding} loss=0.{step}\r", stream)
            await asyncio.sleep(5)
        for rank in range(2):
            one.workers.end(rank, DONE)
        report = await operator.state(AgentState.COMPLETED)
    assert report.faults == ()
    every, often, high = (view.state for view in report.log_rules)
    assert (every, often, high) == (RuleState.STOPPED, RuleState.HEALTHY, RuleState.HEALTHY)


@in_virtual_time
async def test_the_end_of_training_is_no_silence() -> None:
    rule = {**LOSS, "expectedRecurringFrequencyInSeconds": 10, "ranks": "every"}
    async with agent(post_train=Script("post.py")) as one, one.operator() as operator:
        operator.send(start(log_rules=[rule]))
        await operator.workers(0)
        for rank in range(2):
            one.workers.write(rank, "loss=1\n")
            one.workers.end(rank, DONE)
        await asyncio.sleep(60)
        assert one.report().faults == ()
        one.workers.end(0, DONE)
        report = await operator.state(AgentState.COMPLETED)
    assert report.faults == ()


@in_virtual_time
async def test_a_node_of_several_tells_and_does_not_decide() -> None:
    rule = {**LOSS, "ranks": "some", "expectedStartCutOffInSeconds": 60}
    async with agent(1) as one, one.operator() as operator:
        operator.send(start(nnodes=2, log_rules=[rule]))
        report = await operator.report(
            lambda r: any(view.state is RuleState.HANGING for view in r.log_rules)
        )
    assert (report.state, report.faults) == (AgentState.RUNNING, ())


@in_virtual_time
async def test_each_attempt_is_judged_by_itself() -> None:
    hang = {**LOSS, "expectedRecurringFrequencyInSeconds": 30}
    async with agent(1) as one, one.operator() as operator:
        operator.send(start(log_rules=[hang]))
        await operator.workers(0)
        one.workers.write(0, "loss=1\n")
        await operator.state(AgentState.FAULTED, 0)
        operator.send(stop(0))
        ready = await operator.state(AgentState.READY)
        assert ready.log_rules == ()
        operator.send(start(1, log_rules=[{**hang, "expectedStartCutOffInSeconds": 90}]))
        report = await operator.state(AgentState.FAULTED, 1)
    assert "no match for 90 s since the start" in the_fault(report)[2]
