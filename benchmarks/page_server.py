"""The server of the live page as a process of its own, for `page.py`.

    page_server.py DIR SPEED [PROFILE]

Serves the page of the local cluster in DIR with a clock that runs SPEED times as fast, until
SIGTERM.  PROFILE: file for a profile of the server's thread.

DIR/reports.json, if it exists, has the pods of `page_agents.py`. Then the page has the reports from
an operator in its process, which is made up: it decodes the report of each agent every 2 s, as a
real one does.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from page_agents import Agent, agent_of

from unbroken.cli.page import driver
from unbroken.kube import clock
from unbroken.kube.client import connect
from unbroken.local.state import Paths
from unbroken.operator.reports import ReportSource
from unbroken.wire.agent import AgentReport
from unbroken.wire.agent_codec import decode_report

DECODE_SECONDS = 2.0
"""Seconds in which each agent reports once."""


class MadeUpOperator(ReportSource):
    """Reports of all jobs."""

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        super().__init__()
        self._agents = [(pod["of"], agent_of(pod, time.time())) for pod in pods]
        self._reports: dict[str, dict[Any, AgentReport]] = {}
        for job, agent in self._agents:
            self._decode(job, agent)

    def _decode(self, job: str, agent: Agent) -> None:
        self._reports.setdefault(job, {})[agent.uid] = decode_report(agent.report())

    async def run(self) -> None:
        """Take reports for ever."""
        while True:
            for job, agent in self._agents:
                self._decode(job, agent)
                await clock.pause(DECODE_SECONDS / len(self._agents))

    def leader(self) -> Any:
        """Return something: this operator leads."""
        return self

    def of_job(self, namespace: str, job: str) -> dict[Any, AgentReport] | None:
        """Return the newest reports of a job."""
        return self._reports.get(job)


async def serve(directory: Path, speed: float) -> None:
    """Serve until SIGTERM."""
    if speed != 1.0:
        driver.monotonic = lambda: clock.monotonic() * speed  # type: ignore[assignment]
        driver.pause = lambda seconds: clock.pause(seconds / speed)  # type: ignore[assignment]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    client = connect(directory / "internal.kubeconfig")
    try:
        file, operator = directory / "reports.json", None
        if file.exists():
            operator = MadeUpOperator(json.loads(file.read_text()))
        async with driver.serving_page(Paths(directory), client, 0, reports=operator) as url:
            print(url, flush=True)
            reporting = operator and asyncio.create_task(operator.run())
            await ended.wait()
            if reporting:
                reporting.cancel()
    finally:
        await client.close()


def main() -> None:
    """Serve, with a profile if one is asked for."""
    directory, speed, *profile = sys.argv[1:]
    if not profile:
        asyncio.run(serve(Path(directory), float(speed)))
        return
    measured = cProfile.Profile()
    measured.runcall(asyncio.run, serve(Path(directory), float(speed)))
    measured.dump_stats(profile[0])


if __name__ == "__main__":
    main()
