"""The lease on real workers: the agent, its keeper or the kernel ends them when it has run out."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.running import SLEEPER, Running, linked, program, running, start
from tests.watching import until
from unbroken.agent.workers import keeper, lineage
from unbroken.agent.workers.keeper import send_lease
from unbroken.wire.agent import AgentReport, AgentState

LEASE = 4.0
OVER = b"the lease on the workers has run out"


@contextlib.contextmanager
def agents(directory: Path) -> Iterator[tuple[Running, Running]]:
    """Run two agents of one job, each with one worker that lives for ever."""
    for name in ("0", "1"):
        (directory / name).mkdir()
    script = program(directory, SLEEPER)
    with (
        running(directory / "0", script, nproc=1) as first,
        running(directory / "1", script, nproc=1) as second,
    ):
        yield first, second


async def started(first: Running, second: Running) -> tuple[AgentReport, AgentReport]:
    """Start an attempt on both, and let the operator go."""
    parent = f"127.0.0.1:{first.port}"
    async with linked(first) as one, linked(second) as other:
        one.send(start(nnodes=2, lease_seconds=LEASE))
        other.send(start(rank=1, nnodes=2, parent=parent, lease_seconds=LEASE))
        return await one.workers(0), await other.workers(0)


async def ended(report: AgentReport) -> None:
    """Wait until the only worker has ended."""

    def lives() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(report.workers[0].pid, 0)
            return True
        return False

    await until(lives, lambda alive: not alive)


@pytest.mark.slow
async def test_workers_end_where_neither_operator_nor_peers_are_heard(tmp_path: Path) -> None:
    with agents(tmp_path) as (first, second):
        one, other = await started(first, second)
        second.process.kill()
        await ended(other)
        await ended(one)
        report = await until(first.report, lambda found: found.state is AgentState.READY)
        assert (report.newest_attempt, report.lease_seconds) == (0, LEASE)


@pytest.mark.slow
async def test_the_keeper_of_a_frozen_agent_ends_its_workers(tmp_path: Path) -> None:
    with agents(tmp_path) as (first, second):
        one, other = await started(first, second)
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        await ended(one)
        assert first.wait() == 137
        assert OVER in first.stderr.all()
        await ended(other)


@pytest.mark.slow
async def test_workers_end_while_the_whole_machine_is_stopped(tmp_path: Path) -> None:
    with agents(tmp_path) as (first, second):
        one, other = await started(first, second)
        assert one.pid is not None
        pid = one.workers[0].pid
        for number in (first.process.pid, one.pid, pid):
            os.kill(number, signal.SIGSTOP)
        try:
            # By the kernel, which waits for no process.
            await until(lambda: lineage.is_dying(pid))
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert first.wait() == 137
        assert OVER in first.stderr.all()
        await ended(other)


def test_the_newest_of_thousands_of_leases_counts() -> None:
    """A keeper that was stopped alone finds the renewals of minutes."""
    told, tells = os.pipe2(os.O_NONBLOCK)
    for number in range(5000):
        send_lease(tells, float(number))
    assert keeper._newest(told, 0.0) == 4999.0
    assert keeper._newest(told, 7.0) == 7.0
    send_lease(tells, None)
    assert keeper._newest(told, 7.0) == 0.0
    os.close(told)
    os.close(tells)
