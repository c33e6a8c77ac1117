"""Log rules on the output of real workers."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Running, linked, program, running, start, stop
from unbroken.agent.workers.output import Output, Stream
from unbroken.wire.agent import AgentReport, AgentState, FaultKind, RuleState, RuleView

pytestmark = pytest.mark.slow

LOSS = {"name": "loss", "logPattern": r".*loss=(\S+)"}
SILENT = "signal.pause()"


def script(directory: Path, text: str) -> str:
    """Write the script of a worker that logs by calls of `say(stream, text)`."""
    head = """
import os, signal, time
rank = int(os.environ["RANK"])
def say(stream, text):
    os.write(stream, text.encode())
"""
    return program(directory, head + text)


def run(agent: Running, *rules: dict[str, Any], **changes: Any) -> AgentReport:
    """Start with the rules; return the report that shows the end."""

    async def story() -> AgentReport:
        async with linked(agent) as operator:
            operator.send(start(log_rules=rules, **changes))
            return await operator.report(
                lambda r: r.state in (AgentState.COMPLETED, AgentState.FAULTED)
            )

    return asyncio.run(story())


def the_fault(report: AgentReport) -> tuple[str, int, str]:
    """Reason, rank, and text of the only fault."""
    (fault,) = report.faults
    assert (report.state, fault.kind) == (AgentState.FAULTED, FaultKind.LOG_RULE)
    assert fault.message.startswith(f"{report.reason}: ")
    assert report.message.startswith(fault.message)
    return report.reason, fault.rank, fault.message


def the_view(report: AgentReport) -> RuleView:
    """The only rule."""
    (view,) = report.log_rules
    return view


def test_silence_after_the_last_line_is_a_hang(tmp_path: Path) -> None:
    text = f"say(1, f'loss={{rank}}.5\\n')\n{SILENT}"
    rule = {**LOSS, "expectedRecurringFrequencyInSeconds": 0.5}
    with running(tmp_path, script(tmp_path, text)) as agent:
        report = run(agent, rule)
        reason, _, message = the_fault(report)
        assert reason == "LogHang_loss"
        assert "no match for 0.5 s; last on rank" in message
        assert [worker.state for worker in report.workers] == ["running", "running"]
        assert the_view(report).state is RuleState.HANGING
        assert the_view(report).matches == 2
        waited = report.faults[0].at - (the_view(report).last_match_at or 0)
        assert waited == pytest.approx(0.5)


def test_a_worker_that_never_logs_is_a_hang_at_the_cut_off(tmp_path: Path) -> None:
    rule = {**LOSS, "expectedStartCutOffInSeconds": 0.5}
    with running(tmp_path, script(tmp_path, SILENT), nproc=1) as agent:
        report = run(agent, rule)
        reason, _, message = the_fault(report)
        assert (reason, "since the start" in message) == ("LogHang_loss", True)
        assert report.faults[0].at - report.workers[0].started_at == pytest.approx(0.5, abs=0.2)


def test_a_rank_that_must_log_and_does_not_is_named(tmp_path: Path) -> None:
    text = "while True:\n    if rank != 1: say(1, 'loss=1\\n')\n    time.sleep(0.05)"
    rule = {**LOSS, "ranks": "every", "expectedStartCutOffInSeconds": 1}
    with running(tmp_path, script(tmp_path, text)) as agent:
        assert the_fault(run(agent, rule))[:2] == ("LogHang_loss", 1)


def test_bad_values_in_a_row_are_slow(tmp_path: Path) -> None:
    text = f"for value in (9, 1, 9, 9): say(1, f'loss={{value}}\\n')\n{SILENT}"
    rule = {**LOSS, "metricThreshold": 5, "operator": "gt", "metricEvaluationDataPoints": 2}
    with running(tmp_path, script(tmp_path, text), nproc=1) as agent:
        report = run(agent, rule)
        assert the_fault(report)[0] == "LogSlow_loss"
        assert the_view(report).bad_points == 2
        assert the_view(report).last_value == "9"


def test_a_line_on_stderr_of_any_rank_is_a_fault(tmp_path: Path) -> None:
    text = f"if rank == 1: say(2, 'CUDA error 700\\n')\n{SILENT}"
    rule = {"name": "cuda", "logPattern": "CUDA error", "faultOnMatch": True}
    with running(tmp_path, script(tmp_path, text)) as agent:
        report = run(agent, rule)
        assert the_fault(report)[:2] == ("LogFault_cuda", 1)
        assert report.faults[0].lines == ("CUDA error 700",)
        assert report.faults[0].pid == report.workers[1].pid
        assert report.message.endswith("; newest match: CUDA error 700")
        assert agent.status()["reason"] == "LogFault_cuda"


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    text = """
say(1, "step 1 lo")
time.sleep(0.2)
say(1, "ss=1")
time.sleep(0.2)
say(1, "00\\n")
say(1, "done loss=7")
"""
    rule = {**LOSS, "metricThreshold": 50, "operator": "lt", "metricEvaluationDataPoints": 2}
    with running(tmp_path, script(tmp_path, text), nproc=1) as agent:
        report = run(agent, rule)
        assert report.state is AgentState.COMPLETED
        view = the_view(report)
        assert (view.matches, view.bad_points, view.last_value) == (2, 1, "7")


def test_a_job_that_logs_in_time_is_left_alone(tmp_path: Path) -> None:
    text = """
for step in range(20):
    say(1 + rank, f"{'x' * 70000 if step % 5 == 0 else ''} loss=0.{step}\\r")
    time.sleep(0.1)
"""
    rules = [
        {**LOSS, "ranks": "every", "expectedStartCutOffInSeconds": 20},
        {**LOSS, "name": "often", "expectedRecurringFrequencyInSeconds": 1},
        {**LOSS, "name": "high", "metricThreshold": 5, "operator": "gt"},
    ]
    with running(tmp_path, script(tmp_path, text)) as agent:
        report = run(agent, *rules)
        assert (report.state, report.faults) == (AgentState.COMPLETED, ())
        every, often, high = (view.state for view in report.log_rules)
        assert (every, often, high) == (RuleState.STOPPED, RuleState.HEALTHY, RuleState.HEALTHY)


def test_the_end_of_training_is_no_silence(tmp_path: Path) -> None:
    post = program(tmp_path, "import time; time.sleep(1)", "post.py")
    rule = {**LOSS, "expectedRecurringFrequencyInSeconds": 0.5, "ranks": "every"}
    arguments = ("--post-train-script", post, script(tmp_path, "say(1, 'loss=1\\n')"))
    with running(tmp_path, *arguments) as agent:
        report = run(agent, rule)
        assert (report.state, report.faults) == (AgentState.COMPLETED, ())


async def test_a_node_of_several_tells_and_does_not_decide(tmp_path: Path) -> None:
    rule = {**LOSS, "ranks": "some", "expectedStartCutOffInSeconds": 0.3}

    async def story(agent: Running) -> AgentReport:
        async with linked(agent) as operator:
            operator.send(start(nnodes=2, log_rules=[rule]))
            return await operator.report(
                lambda r: any(view.state is RuleState.HANGING for view in r.log_rules)
            )

    with running(tmp_path, script(tmp_path, SILENT), nproc=1) as agent:
        report = await story(agent)
    assert (report.state, report.faults) == (AgentState.RUNNING, ())


async def test_each_attempt_is_judged_by_itself(tmp_path: Path) -> None:
    text = f"if os.environ['JOB_RESTART_COUNT'] == '0': say(1, 'loss=1\\n')\n{SILENT}"
    hang = {**LOSS, "expectedRecurringFrequencyInSeconds": 0.3}

    async def story(agent: Running) -> AgentReport:
        async with linked(agent) as operator:
            operator.send(start(log_rules=[hang]))
            await operator.state(AgentState.FAULTED, 0)
            operator.send(stop(0))
            ready = await operator.state(AgentState.READY)
            assert ready.log_rules == ()
            operator.send(start(1, log_rules=[{**hang, "expectedStartCutOffInSeconds": 0.6}]))
            return await operator.state(AgentState.FAULTED, 1)

    with running(tmp_path, script(tmp_path, text), nproc=1) as agent:
        report = await story(agent)
    assert "no match for 0.6 s since the start" in the_fault(report)[2]


async def test_without_rules_nothing_of_them_is_loaded(tmp_path: Path) -> None:
    with running(tmp_path, script(tmp_path, SILENT), nproc=1) as agent:

        async def story(rules: tuple[dict[str, Any], ...], attempt: int) -> int | None:
            async with linked(agent) as operator:
                operator.send(start(attempt, log_rules=rules))
                report = await operator.state(AgentState.RUNNING, attempt)
                if rules:
                    await operator.report(lambda r: bool(r.log_rules))
                operator.send(stop(attempt))
                await operator.state(AgentState.READY)
            return report.pid

        def is_loaded() -> bool:
            return "_re2" in Path(f"/proc/{pid}/maps").read_text()

        pid = await story((), 0)
        assert not is_loaded()
        await story((LOSS,), 1)
        assert is_loaded()


def test_what_was_written_in_time_is_read_before_the_deadline_counts() -> None:
    events: list[str] = []
    is_over = threading.Event()

    class Due:
        """A deadline that has come."""

        def deadline(self) -> float | None:
            return None if is_over.is_set() else 5.0

        def tick(self) -> None:
            events.append("tick")
            is_over.set()

    source, to_source = os.pipe()
    os.write(to_source, b"line\n")
    output = Output(lambda: 5.0)
    stream = Stream(source, None, None, b"")
    stream.on_read = lambda chunk, is_drained: events.append(f"{chunk.decode()!r} {is_drained}")
    output.add(stream)
    output.watch(Due())
    output.start()
    assert is_over.wait(20)
    os.close(to_source)
    output.finish((stream,), lambda: events.append("finished"))
    output.stop(20)
    assert events == ["'line\\n' True", "tick", "'' True", "finished"]
