"""Plain torchrun with our rendezvous: ranks from the operator, a fresh store for each attempt."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.running import SLEEPER, linked, program, running, start, stop
from unbroken.agent.torchrun import _end, _Seen
from unbroken.wire.agent import AgentState, FaultKind, ShutdownCommand

pytestmark = pytest.mark.slow

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=unbroken"),
    *("--nnodes=1", "--nproc-per-node=2", "--max-restarts=9", "--monitor-interval=0.05"),
)
REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == int(os.environ["WORLD_SIZE"])
names = ("RANK", "MASTER_PORT", "JOB_RESTART_COUNT", "GROUP_RANK")
with open("ranks", "a") as file:
    print(*(os.environ[name] for name in names), file=file)
assert "UNBROKEN_AGENT_KEY_FILE" not in os.environ
dist.destroy_process_group()
# At the end of an interpreter a thread of gloo may abort the process (worker/boot/keepers.py):
# nobody keeps it from torchrun's workers.
os._exit(0)
"""


async def test_attempts_are_commanded_killed_and_restarted_in_one_torchrun(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, SLEEPER), command=TORCHRUN) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.report(lambda r: len(r.workers) == 2)
            assert [worker.rank for worker in report.workers] == [0, 1]
            assert report.lease_seconds is None, "nothing ends its workers in time"
            victim = report.workers[1]
            os.kill(victim.pid, signal.SIGKILL)
            report = await operator.state(AgentState.FAULTED)
            (fault,) = report.faults
            assert (fault.local_rank, fault.kind, fault.signal) == (1, FaultKind.SIGNAL, 9)
            operator.send(stop(0))
            await operator.state(AgentState.READY)
            operator.send(start(1))
            report = await operator.report(lambda r: len(r.workers) == 2)
            assert victim.pid not in {worker.pid for worker in report.workers}
            # A healthy attempt is stopped as well: another node's worker has failed.
            operator.send(stop(1))
            report = await operator.state(AgentState.READY)
            assert (report.newest_attempt, operator.losses) == (1, [])
            operator.send(ShutdownCommand())
            assert await asyncio.to_thread(agent.wait) == 0


async def test_ranks_and_the_store_are_the_operators(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, REDUCE), command=TORCHRUN) as agent:
        async with linked(agent) as operator:
            report = await operator.state(AgentState.READY)
            port = report.offered_port
            operator.send(start(7, master_port=port))
            report = await operator.state(AgentState.COMPLETED)
            assert {worker.state for worker in report.workers} == {"succeeded"}
            lines = sorted((tmp_path / "ranks").read_text().splitlines())
            assert lines == [f"0 {port} 7 0", f"1 {port} 7 0"]
            assert agent.process.poll() is None, "it waits until the job lets it go"
            operator.send(ShutdownCommand())
            assert await asyncio.to_thread(agent.wait) == 0


LATE = """
import pathlib, sys, time
from unbroken.agent import torchrun
real = torchrun.Rendezvous.next_rendezvous
def late(self):
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return real(self)
torchrun.Rendezvous.next_rendezvous = late
"""
BLIND = """
from unbroken.agent import torchrun
torchrun.LOOK_SECONDS = 3600.0
"""


def busy(directory: Path, how: str) -> tuple[str, ...]:
    """A torchrun on a busy machine: one of its two threads gets no time."""
    started = directory / "busy_torchrun.py"
    started.write_text(f"{how}\nfrom torch.distributed.run import main\nmain()\n")
    return (sys.executable, str(started), *TORCHRUN[3:])


async def test_a_start_that_comes_before_torchrun_asks_for_it_is_run(tmp_path: Path) -> None:
    script, command = program(tmp_path, SLEEPER), busy(tmp_path, LATE)
    with running(tmp_path, script, command=command) as agent:
        async with linked(agent) as operator:
            await operator.state(AgentState.READY)
            operator.send(start(7))
            await operator.report(lambda r: r.newest_attempt == 7)
            (tmp_path / "go").touch()
            report = await operator.report(lambda r: len(r.workers) == 2 or bool(r.faults))
            assert report.faults == ()
            assert report.attempt == 7
            operator.send(stop(7))
            await operator.state(AgentState.READY)
            operator.send(ShutdownCommand())
            assert await asyncio.to_thread(agent.wait) == 0


async def test_workers_that_succeed_before_they_are_seen_complete_the_job(tmp_path: Path) -> None:
    script, command = program(tmp_path, ""), busy(tmp_path, BLIND)
    with running(tmp_path, script, command=command) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.state(AgentState.COMPLETED)
            assert [worker.state for worker in report.workers] == ["succeeded"] * 2
            operator.send(ShutdownCommand())
            assert await asyncio.to_thread(agent.wait) == 0


async def test_a_script_that_fails_at_once_is_told(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, "1 / 0"), command=TORCHRUN) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.state(AgentState.FAULTED)
            assert report.faults[0].kind in (
                FaultKind.EXIT_CODE,
                FaultKind.EXCEPTION,
                FaultKind.NOT_STARTED,
            )
            operator.send(stop(0))
            await operator.state(AgentState.READY)


@pytest.mark.parametrize(
    ("program", "expected"),
    [("import sys; sys.exit(3)", (3, None)), ("import os; os.kill(os.getpid(), 9)", (None, 9))],
)
def test_the_end_of_a_worker_that_torchrun_has_reaped_is_known(
    program: str, expected: tuple[int | None, int | None], tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", program]) as worker:
        pidfd = os.pidfd_open(worker.pid)
        try:
            worker.wait()
            end = _end(worker.pid, _Seen(0, pidfd, str(tmp_path)))
        finally:
            os.close(pidfd)
    assert (end.exit_code, end.signal) == expected
