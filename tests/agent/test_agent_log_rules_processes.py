"""Log rules on the output of real workers, read by a thread of the agent."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Running, linked, program, running, start, stop
from tests.agent.test_agent_log_rules import LOSS, the_fault, the_view
from tests.watching import PATIENCE_SECONDS
from unbroken.agent.workers.output import OutputThread, Stream
from unbroken.wire.agent import AgentReport, AgentState, RuleState

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_line_of_a_flood_is_kept_from_the_rules(tmp_path: Path) -> None:
    """60 MB: more than any log of the output keeps."""
    flood = 'say(1, ("x" * 99 + "\\n") * 3000)'
    text = f"for n in range(100):\n    {flood}\n    say(1, f'loss={{n}}.5\\n')\n    {flood}\n"
    with running(tmp_path, script(tmp_path, text), nproc=1) as agent:
        report = run(agent, LOSS)
        assert report.state is AgentState.COMPLETED
        assert the_view(report).matches == 100


@pytest.mark.slow
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
    output = OutputThread(lambda: 5.0)
    stream = Stream(source, None, None, b"")
    stream.on_read = lambda chunk, is_drained: events.append(f"{chunk.decode()!r} {is_drained}")
    output.add(stream)
    output.watch(Due())
    output.start()
    assert is_over.wait(PATIENCE_SECONDS)
    os.close(to_source)
    output.finish((stream,), lambda: events.append("finished"))
    output.stop(20)
    assert events == ["'line\\n' True", "tick", "'' True", "finished"]
