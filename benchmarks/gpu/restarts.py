"""Seconds that a job of one node pauses when a rank is killed.

A real agent runs the ranks, and this program is its operator. It measures from the kill to the
first step of all ranks, in three modes. Survivors keep their process (`in-process`), all processes
are new and start with their imports done (`warm`), or all processes start from nothing (`cold`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from machine import Machine, Outcome

from tests.agent.running import Operator, Running, linked, running, start, stop
from unbroken.wire.agent import IN_PROCESS_RESTART, PROCESS_RESTART, AgentState

SCRIPT = Path(__file__).with_name("restart_train.py")
MODES = ("in-process", "warm", "cold")
STEPS_BETWEEN = 3
BOUND_SECONDS = 120.0


class NotRecoveredError(Exception):
    """The job did not continue; the text says what it waited for."""


@dataclass
class Ranks:
    """Reports of the ranks."""

    size: int
    reports: list[dict[str, Any]] = field(default_factory=list)

    def of(self, attempt: int, what: str) -> dict[int, list[dict[str, Any]]]:
        """Return the reports of one kind in an attempt, by rank."""
        kept: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(self.size)}
        for one in self.reports:
            if (one["attempt"], one["what"]) == (attempt, what):
                kept[one["rank"]].append(one)
        return kept

    def have_made(self, attempt: int, steps: int) -> bool:
        """Return whether all ranks have made `steps` steps of an attempt."""
        return all(len(made) >= steps for made in self.of(attempt, "step").values())


@contextmanager
def listening(ranks: Ranks, operator: Operator, path: Path) -> Iterator[None]:
    """Receive reports of ranks while the block runs."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ours:
        ours.bind(str(path))

        def take() -> None:
            with suppress(BlockingIOError):
                while True:
                    ranks.reports.append(json.loads(ours.recv(4096)))
            operator.news.set()

        loop.add_reader(ours, take)
        try:
            yield
        finally:
            loop.remove_reader(ours)


@dataclass
class Trial:
    """One mode: kills and their outcomes."""

    mode: str
    machine: Machine
    agent: Running
    operator: Operator
    ranks: Ranks
    seconds: list[float] = field(default_factory=list)
    lost_steps: list[int] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    problems: list[str] = field(default_factory=list)

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`. NotRecoveredError after the bound."""
        try:
            await asyncio.wait_for(self.operator.until(holds), BOUND_SECONDS)
        except TimeoutError:
            reports = self.operator.reports
            newest = reports[-1] if reports else None
            told = f"{newest.state.value} {newest.faults}" if newest else "never heard"
            raise NotRecoveredError(f"{self.mode}: {what}; agent: {told}"[:500]) from None

    def has_faulted(self, attempt: int) -> bool:
        """Return whether the agent reports the attempt as faulted."""
        newest = self.operator.reports[-1]
        return newest.state is AgentState.FAULTED and newest.attempt == attempt

    async def state(self, state: AgentState, attempt: int) -> None:
        """Wait until the agent reports a state in an attempt."""
        await self.until(
            f"waited for {state.value} of attempt {attempt}",
            lambda: any(
                one.state is state and attempt in (one.attempt, one.newest_attempt)
                for one in self.operator.reports[-1:]
            ),
        )

    async def parked(self, times: int) -> None:
        """Wait until the next start can be warm."""
        line = r"(?s)" + "are parked.*" * times
        seen = asyncio.to_thread(self.agent.stderr.wait_for, line)
        try:
            await asyncio.wait_for(seen, BOUND_SECONDS)
        except TimeoutError:
            raise NotRecoveredError(f"{self.mode}: nobody was parked") from None

    async def kill(self, attempt: int) -> None:
        """Kill one rank of an attempt, and start the next attempt."""
        await self.until(
            "waited for steps",
            lambda: self.ranks.have_made(attempt, STEPS_BETWEEN) or self.has_faulted(attempt),
        )
        if self.has_faulted(attempt):
            raise NotRecoveredError(f"{self.mode}: {self.operator.reports[-1].faults[:1]}"[:900])
        if self.mode != "cold":
            await self.parked(attempt + 1)
        before = {one.rank: one.pid for one in self.operator.reports[-1].workers}
        victim = attempt % self.ranks.size
        killed_at = time.monotonic()
        os.kill(before[victim], signal.SIGKILL)
        await self.state(AgentState.FAULTED, attempt)
        how = IN_PROCESS_RESTART if self.mode == "in-process" else PROCESS_RESTART
        self.operator.send(stop(attempt, restart_mode=how))
        await self.state(AgentState.READY, attempt)
        port = self.operator.reports[-1].offered_port
        self.operator.send(start(attempt + 1, master_port=port))
        await self.until(
            "waited for a step",
            lambda: self.ranks.have_made(attempt + 1, 1) or self.has_faulted(attempt + 1),
        )
        if not self.ranks.have_made(attempt + 1, 1):
            raise NotRecoveredError(f"{self.mode}: {self.operator.reports[-1].faults[:1]}"[:900])
        self.judge(attempt, killed_at, before, victim)

    def judge(self, attempt: int, killed_at: float, before: dict[int, int], victim: int) -> None:
        """Record the duration of a restart, and check the promises of the mode."""
        first = {rank: made[0] for rank, made in self.ranks.of(attempt + 1, "step").items()}
        self.seconds.append(max(one["at"] for one in first.values()) - killed_at)
        earlier = [made[-1]["step"] for made in self.ranks.of(attempt, "step").values()]
        resumed = {one["step"] for one in first.values()}
        if len(resumed) != 1:
            self.problems.append(f"attempt {attempt + 1}: ranks went on at steps {sorted(resumed)}")
        self.lost_steps.append(max(earlier) + 1 - min(resumed))
        for worker in self.operator.reports[-1].workers:
            is_kept = worker.pid == before[worker.rank]
            self.kept += is_kept
            how = "kept" if is_kept else worker.start
            self.starts[how] = self.starts.get(how, 0) + 1
            if is_kept != (self.mode == "in-process" and worker.rank != victim):
                self.problems.append(f"attempt {attempt + 1}: rank {worker.rank} was {how}")
            if is_kept:
                self._judge_memory(attempt, worker.rank)

    def _judge_memory(self, attempt: int, rank: int) -> None:
        (old,), (new,) = (self.ranks.of(one, "joined")[rank][-1:] for one in (attempt, attempt + 1))
        if old["address"] != new["address"] or not new["is_intact"]:
            self.problems.append(f"attempt {attempt + 1}: rank {rank} lost its device memory")

    def outcome(self) -> Outcome:
        """Return the outcome for the table."""
        # A ring of more than two may add in another order in the next attempt.
        is_exact = self.machine.backend == "gloo" or self.ranks.size == 2
        by_step: dict[tuple[int, int], set[int]] = {}
        for one in self.ranks.reports:
            if one["what"] == "step":
                key = (one["step"], 0 if is_exact else one["attempt"])
                by_step.setdefault(key, set()).add(one["checksum"])
        differing = sorted(step for (step, _), sums in by_step.items() if len(sums) > 1)
        if differing:
            self.problems.append(f"weights differ after steps {differing[:5]}")
        if self.mode == "warm" and set(self.starts) != {"warm"}:
            self.problems.append(f"not all starts were warm: {self.starts}")
        ordered = sorted(self.seconds)
        figures = {
            "backend": self.machine.backend, "ranks": self.ranks.size, "kills": len(ordered),
            "p50_seconds": at_share(ordered, 0.5), "p95_seconds": at_share(ordered, 0.95),
            "seconds": [round(one, 3) for one in self.seconds],
            "lost_steps_max": max(self.lost_steps, default=None), "starts": self.starts,
            "steps_compared": len(by_step),
        }  # fmt: skip
        if self.machine.why_gloo:
            figures["why_gloo"] = self.machine.why_gloo
        return Outcome(f"restart {self.mode}", figures, self.problems)


def at_share(ordered: list[float], share: float) -> float | None:
    """Return the value at a share of the sorted values. None if there are none."""
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else None


async def _measured(mode: str, machine: Machine, kills: int, folder: Path) -> Outcome:
    environ = {
        "BENCH_SOCKET": str(folder / "bench"), "BENCH_DEVICE": machine.device,
        "BENCH_BACKEND": machine.backend, "UNBROKEN_WARM": "off" if mode == "cold" else "on",
    }  # fmt: skip
    ranks = Ranks(machine.ranks)
    words = ("--server-log-level=info", str(SCRIPT))
    with running(folder, *words, nproc=ranks.size, **environ) as agent:
        async with linked(agent) as operator:
            trial = Trial(mode, machine, agent, operator, ranks)
            with listening(ranks, operator, folder / "bench"):
                try:
                    await trial.until("waited for the agent", lambda: bool(operator.reports))
                    port = operator.reports[-1].offered_port
                    operator.send(start(0, master_port=port))
                    for attempt in range(kills):
                        await trial.kill(attempt)
                except NotRecoveredError as error:
                    trial.problems.append(str(error))
    if trial.problems:
        for part in ("stdout", "stderr"):
            log = folder.parent / f"{mode}-{part}.log"
            log.write_bytes(getattr(agent, part).all())
    return trial.outcome()


def measure(machine: Machine, kills: int, modes: tuple[str, ...], out: Path) -> Iterator[Outcome]:
    """Yield the outcome of each mode. The logs of a mode with errors are left in `out`."""
    for mode in modes:
        # A socket's path is short.
        with tempfile.TemporaryDirectory(prefix="bench") as folder:
            inner = Path(folder) / mode
            inner.mkdir()
            yield asyncio.run(_measured(mode, machine, kills, inner))
            for log in Path(folder).glob("*.log"):
                (out / log.name).write_bytes(log.read_bytes())
