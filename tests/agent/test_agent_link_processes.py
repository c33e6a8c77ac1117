"""The link to real agents: frozen, killed, and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.agent.running import SLEEPER, linked, program, running, start
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow


async def test_a_frozen_agent_is_lost_once_and_found_again(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.workers(0)
            assert report.pid is not None
            os.kill(report.pid, signal.SIGSTOP)
            try:
                await operator.until(lambda: bool(operator.losses))
                assert operator.losses == [
                    f"the agent at 127.0.0.1:{agent.port} was silent for 3 s"
                ]
            finally:
                os.kill(report.pid, signal.SIGCONT)
            count = len(operator.reports)
            await operator.until(lambda: len(operator.reports) > count)
            assert operator.reports[-1].agent_id == report.agent_id
            assert operator.reports[-1].state is AgentState.RUNNING
            assert len(operator.losses) == 1


async def test_a_killed_agent_is_lost_at_once_and_the_next_one_has_another_name(
    tmp_path: Path,
) -> None:
    script = program(tmp_path, SLEEPER)
    with running(tmp_path, script) as agent:
        async with linked(agent) as operator:
            report = await operator.state(AgentState.READY)
            assert report.pid is not None
            os.kill(report.pid, signal.SIGKILL)
            await operator.until(lambda: bool(operator.losses))
            # The kernel closes the link before it closes the port: a new link may come in between.
            [loss] = operator.losses
            told = f"the agent at 127.0.0.1:{agent.port}"
            assert loss in (f"{told} refused the connection", f"{told} closed the connection")
            arguments = ("--server-port", str(agent.port), script)
            with running(tmp_path, *arguments):
                again = await operator.report(lambda r: r.agent_id != report.agent_id)
                assert again.newest_attempt is None
                assert len(operator.losses) == 1
