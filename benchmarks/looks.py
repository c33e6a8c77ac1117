#!/usr/bin/env python3
"""Cost of watching a rank, and of looking at it, for a training step.

    benchmarks/looks.py [--quick] [--json FILE]

A real agent runs one worker: a torch step on one core that calls `worker.progress`.  Windows
without and with one look (twice the stack, once with native frames), and with one second of
samples, are measured in turns.

`watching` is the processor time that agent and keeper use for the rank between looks, as a share
of one core.  `look` and `samples` are, for each of them, the lost training time, and the processor
time used in addition to the worker's.  A rank without any other sign of progress is looked at each
60 s at most (`CALM_PAUSE_SECONDS_MAX`).  `look, share` is the share of time that is lost then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

from agent_latency import agent, family
from arguments import output_file

from unbroken.agent_http.client import AgentLink
from unbroken.core.patience import CALM_PAUSE_SECONDS_MAX
from unbroken.wire.agent import AgentReport, AgentState, StartCommand
from unbroken.wire.observation import CollectCommand, Evidence

WIDTH, BATCH = 1024, 128
LEARN_SECONDS, WINDOW_SECONDS = 30.0, 8.0
LOOK_SECONDS, SAMPLE_SECONDS, SAMPLES_PER_SECOND = 4.0, 7.0, 3
RECORD = struct.Struct("d")
TICKS = os.sysconf("SC_CLK_TCK")


def train(records: str) -> None:
    """Make steps for ever; append the end of each to a file."""
    import torch
    from torch import nn

    from unbroken import worker

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH)
    print("up", flush=True)
    step = 0
    with open(records, "ab", buffering=0) as log:
        while True:
            step += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            worker.progress(step)
            log.write(RECORD.pack(time.monotonic()))


class Harness:
    """An operator of one agent, and the steps of its worker."""

    def __init__(self, port: int, pid: int, records: Path) -> None:
        self.link = AgentLink(
            "127.0.0.1", port, None, self._heard, lambda why: None, on_evidence=self._seen
        )
        self._family = family(pid)
        self._records = records
        self._report: AgentReport | None = None
        self._news = asyncio.Event()
        self._answers = 0
        self._asked = 0

    def _heard(self, report: AgentReport) -> None:
        self._report = report
        self._news.set()

    def _seen(self, evidence: Evidence) -> None:
        self._answers += 1

    async def state(self, state: AgentState) -> None:
        """Wait until the agent has reported a state."""
        while self._report is None or self._report.state is not state:
            self._news.clear()
            await self._news.wait()

    def processor_seconds(self) -> float:
        """Processor time of keeper and agent, and of children that they have waited for."""
        found = 0.0
        for pid in self._family:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += sum(map(int, fields[11:13])) / TICKS
            if pid == self._family[-1]:
                found += sum(map(int, fields[13:15])) / TICKS
        return found

    async def window(self, seconds: float, samples_per_second: int = 0) -> tuple[float, float]:
        """Return the seconds of a step and the processor seconds of one window.

        A question that takes `seconds` is asked at its beginning; none if they are 0.
        """
        used, began = self.processor_seconds(), time.monotonic()
        if seconds:
            self._asked += 1
            self.link.send(CollectCommand(self._asked, 0, seconds, samples_per_second))
        await asyncio.sleep(WINDOW_SECONDS)
        used = self.processor_seconds() - used
        assert self._answers == self._asked, "the agent has not answered"
        ends = [at for (at,) in RECORD.iter_unpack(self._records.read_bytes()) if at >= began]
        return (ends[-1] - ends[0]) / (len(ends) - 1), used


async def measure(directory: Path, rounds: int) -> dict[str, float]:
    """Measure all figures."""
    records = directory / "records"
    script = directory / "step.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n")
    with script.open("a") as file:
        file.write(f"import looks; looks.train({str(records)!r})\n")
    lost: dict[str, list[float]] = {"look": [], "samples": []}
    spent: dict[str, list[float]] = {"look": [], "samples": []}
    watched = []
    with agent(directory, 1, script) as (process, port, _):
        harness = Harness(port, process.pid, records)
        async with asyncio.TaskGroup() as tasks:
            link = tasks.create_task(harness.link.run())
            await harness.state(AgentState.READY)
            harness.link.send(StartCommand(0, 0, 1, "127.0.0.1", 1))
            await harness.state(AgentState.RUNNING)
            await asyncio.sleep(LEARN_SECONDS)
            for number in range(rounds):
                calm, used = await harness.window(0.0)
                watched.append(used / WINDOW_SECONDS)
                looked = await harness.window(LOOK_SECONDS)
                sampled = await harness.window(SAMPLE_SECONDS, SAMPLES_PER_SECOND)
                for name, (step, more) in (("look", looked), ("samples", sampled)):
                    lost[name].append((1 - calm / step) * WINDOW_SECONDS)
                    spent[name].append(more - used)
                print(f"{number + 1}/{rounds}", end="\r", file=sys.stderr, flush=True)
            link.cancel()
    figures = {"step, ms": calm * 1000, "watching, share of a core": statistics.median(watched)}
    for name in lost:
        figures[f"{name}, ms lost"] = statistics.median(lost[name]) * 1000
        figures[f"{name}, ms of processor"] = statistics.median(spent[name]) * 1000
    figures["look, share"] = statistics.median(lost["look"]) / CALM_PAUSE_SECONDS_MAX
    figures["load"] = os.getloadavg()[0]
    return figures


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 15")
    parser.add_argument("--json", type=output_file, help="write the figures to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(measure(Path(name), 3 if options.quick else 15))
    for name, value in figures.items():
        print(f"{name:28} {value:9.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
