"""Start time, memory, processor time and reaction times of the agent.

`python benchmarks/agent_latency.py [--json FILE]`; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arguments import output_file

from unbroken.agent_http.client import AgentLink
from unbroken.wire.agent import AgentReport, AgentState, StartCommand, StopCommand

WORKER = "import signal; print('up', flush=True); signal.pause()"
REST_SECONDS = 20.0


@contextmanager
def agent(
    directory: Path, nproc: int, script: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """Start an agent; yield the agent, its port, and the seconds from its exec until it listens.

    Its workers run the script. Without a script, each worker only waits.
    """
    if script is None:
        script = directory / "worker.py"
        script.write_text(WORKER)
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "unbroken.agent", "--server-host=127.0.0.1"),
            *("--server-port=0", f"--nproc-per-node={nproc}", f"--log-dir={directory}"),
            str(script),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"UNBROKEN_AGENT_AUTH": "none"},
    )
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    seconds = time.monotonic() - began
    try:
        yield process, int(line.partition("127.0.0.1:")[2].split()[0]), seconds
    finally:
        process.terminate()
        process.communicate()


def family(pid: int) -> list[int]:
    """Return the process ids of the keeper and of the agent below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def resident_mib(pid: int) -> float:
    """Proportional memory of a process (PSS), so that keeper and agent can be added up."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) / 1024


def rss_mib(pid: int) -> float:
    """Resident memory as `ps` shows it."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def processor_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Operator:
    """Waits for reports of one agent."""

    def __init__(self, port: int) -> None:
        self.link = AgentLink("127.0.0.1", port, None, self.heard, lambda why: None)
        self.newest: AgentReport | None = None
        self.news = asyncio.Event()

    def heard(self, report: AgentReport) -> None:
        """Keep the newest report."""
        self.newest = report
        self.news.set()

    async def state(self, state: AgentState, is_up: bool = False) -> AgentReport:
        """Wait for a state; with `is_up` until every worker has written something."""
        while True:
            report = self.newest
            if report is not None and report.state is state:
                written = [w.first_output_at for w in report.workers]
                if not is_up or (len(written) == report.nproc and all(written)):
                    return report
            self.news.clear()
            await self.news.wait()


async def at_rest(port: int, pid: int, seconds: float) -> float:
    """Share of one core, in per cent, that the idle agent uses with one operator connected."""
    operator = Operator(port)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(operator.link.run())
        await operator.state(AgentState.READY)
        before, began = sum(map(processor_seconds, family(pid))), time.monotonic()
        await asyncio.sleep(seconds)
        used = sum(map(processor_seconds, family(pid))) - before
        share = used / (time.monotonic() - began) * 100
        task.cancel()
    return share


async def reactions(port: int, cycles: int) -> dict[str, list[float]]:
    """Milliseconds from start to first output, from kill to FAULTED and from stop to READY.

    FAULTED and READY count when the operator receives them.
    """
    found: dict[str, list[float]] = {"start": [], "faulted": [], "ready": []}
    operator = Operator(port)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(operator.link.run())
        await operator.state(AgentState.READY)
        for attempt in range(cycles):
            began = time.monotonic()
            operator.link.send(StartCommand(attempt, 0, 1, "127.0.0.1", 1))
            report = await operator.state(AgentState.RUNNING, is_up=True)
            found["start"].append(time.monotonic() - began)
            began = time.monotonic()
            os.kill(report.workers[0].pid, signal.SIGKILL)
            await operator.state(AgentState.FAULTED)
            found["faulted"].append(time.monotonic() - began)
            began = time.monotonic()
            operator.link.send(StopCommand(attempt))
            await operator.state(AgentState.READY)
            found["ready"].append(time.monotonic() - began)
        task.cancel()
    return {name: [1000 * value for value in values] for name, values in found.items()}


async def log_faults(port: int, cycles: int) -> dict[str, list[float]]:
    """Milliseconds from a log rule's deadline, or its line, until FAULTED is received."""
    hang = {"name": "r", "logPattern": "up", "expectedRecurringFrequencyInSeconds": 0.5}
    line = {"name": "r", "logPattern": "up", "faultOnMatch": True}
    found: dict[str, list[float]] = {"log_hang": [], "log_line": []}
    operator = Operator(port)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(operator.link.run())
        await operator.state(AgentState.READY)
        for attempt in range(2 * cycles):
            rule = line if attempt % 2 else hang
            start = StartCommand(attempt, 0, 1, "127.0.0.1", 1, log_rules=(rule,))
            operator.link.send(start)
            report = await operator.state(AgentState.FAULTED)
            late = time.time() - report.faults[0].at
            found["log_line" if attempt % 2 else "log_hang"].append(late)
            operator.link.send(StopCommand(attempt))
            await operator.state(AgentState.READY)
        task.cancel()
    return {name: [1000 * value for value in values] for name, values in found.items()}


def measure(starts: int, cycles: int, rest: float) -> dict[str, float]:
    """Measure every figure once."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        seconds = []
        for _ in range(starts):
            with agent(directory, 2) as (_, _, taken):
                seconds.append(taken)
        with agent(directory, 8) as (process, port, _):
            shares = asyncio.run(at_rest(port, process.pid, rest))
            pids = family(process.pid)
            figures = {
                "start_seconds_p50": statistics.median(seconds),
                "rss_mib": max(map(rss_mib, pids)),
                "pss_mib_with_keeper": sum(map(resident_mib, pids)),
                "cpu_percent_at_rest": shares,
            }
            reacted = asyncio.run(reactions(port, cycles))
        with agent(directory, 8) as (_, port, _):
            reacted |= asyncio.run(log_faults(port, cycles))
        for label, values in reacted.items():
            figures[f"{label}_ms_p50"] = statistics.median(values)
            figures[f"{label}_ms_max"] = max(values)
    return figures


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    figures = measure(5, 5, 5.0) if options.quick else measure(20, 20, REST_SECONDS)
    for name, value in figures.items():
        print(f"{name:22} {value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
