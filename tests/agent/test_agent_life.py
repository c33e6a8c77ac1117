"""Real workers under a real agent: started, killed, stopped, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.agent.running import SLEEPER, linked, marked, program, running, start, stop
from unbroken.wire.agent import AgentState, FaultKind, ShutdownCommand

pytestmark = pytest.mark.slow

FAMILY = """
import os, signal, subprocess, sys
child = "import signal; signal.pause()"
subprocess.Popen([sys.executable, "-c", child])
subprocess.Popen([sys.executable, "-c", child], process_group=0)
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
# A daemon: its parent ends, and it has a session of its own.
daemon = "import os, sys; os.fork() and os._exit(0); os.setsid(); "
daemon += "os.execv(sys.executable, sys.argv)"
subprocess.run([sys.executable, "-c", daemon, "-c", child], check=True)
print("family", flush=True)
signal.pause()
"""
FAMILY_SIZE = 5
STUBBORN = """
import os, signal
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda *_: os.write(1, b"no\\n"))
os.write(1, b"up\\n")
while True:
    signal.pause()
"""
OBEDIENT = """
import os, signal, sys
def obey(number, frame):
    os.write(1, f"told {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGTERM, obey)
signal.signal(signal.SIGUSR1, obey)
os.write(1, b"up\\n")
signal.pause()
"""


async def test_a_killed_worker_takes_the_nodes_others_with_it(tmp_path: Path) -> None:
    victim = 1
    with running(tmp_path, program(tmp_path, SLEEPER), nproc=3) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.workers(0)
            os.kill(report.workers[victim].pid, signal.SIGKILL)
            report = await operator.state(AgentState.FAULTED)
            (fault,) = report.faults
            assert (fault.kind, fault.local_rank) == (FaultKind.SIGNAL, victim)
            assert (fault.signal, fault.exit_code) == (9, None)
            operator.send(stop(0))
            report = await operator.state(AgentState.READY)
            assert len(agent.processes()) == 1, "something besides the agent lives"
            assert (report.newest_attempt, report.attempt, report.rank) == (0, None, 0)
            operator.send(start(1))
            report = await operator.workers(1)
            assert {worker.state for worker in report.workers} == {"running"}
            text = agent.attempt_file(1, victim, "stdout.log").read_text()
            assert text == f"up {victim} of 3\n"


async def test_ready_means_that_no_descendant_lives(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, FAMILY), nproc=2) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.workers(0)
            assert len(agent.processes()) == 1 + 2 * FAMILY_SIZE
            operator.send(stop(0))
            await operator.state(AgentState.READY)
            assert len(agent.processes()) == 1


@pytest.mark.parametrize("victim", ["agent", "keeper", "both workers"])
async def test_nothing_outlives_what_was_killed(tmp_path: Path, victim: str) -> None:
    with running(tmp_path, program(tmp_path, FAMILY), nproc=2) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.workers(0)
            assert report.pid is not None
            if victim == "both workers":
                for worker in report.workers:
                    os.kill(worker.pid, signal.SIGKILL)
                await operator.state(AgentState.FAULTED)
                operator.send(stop(0))
                await operator.state(AgentState.READY)
                assert agent.processes() == [report.pid]
                return
            pid = report.pid if victim == "agent" else agent.process.pid
            descriptors = [os.pidfd_open(pid) for pid in agent.processes()]
            os.kill(pid, signal.SIGKILL)
            code = agent.wait()
            assert code == (137 if victim == "agent" else -9)
            # The keeper waits for all; without it the agent itself does, and nobody for it.
            for fd in descriptors:
                await readable(fd)
                os.close(fd)
            assert marked(agent.mark) == []
            await operator.until(lambda: len(operator.losses) == 1)


WITH_HELPER = """
import os, signal, subprocess
subprocess.Popen(["sleep", "1000"])
os.write(1, b"up\\n")
signal.pause()
"""


async def test_workers_end_with_an_agent_that_leaves_nobody_to_end_them(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, WITH_HELPER), nproc=2) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.workers(0)
            assert report.pid is not None
            both = (agent.process.pid, report.pid)
            left = [pid for pid in agent.processes() if pid not in both]
            assert len(left) == 2 * len(report.workers)
            descriptors = [os.pidfd_open(pid) for pid in left]
            # Stopped, neither can end anything when the other is killed.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in both:
                    os.kill(pid, number)
            for fd in descriptors:
                await readable(fd)
                os.close(fd)
            agent.wait()


async def readable(fd: int) -> None:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, event.set)
    await event.wait()
    loop.remove_reader(fd)


async def test_many_attempts_follow_one_another(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        async with linked(agent) as operator:
            ports = set()
            for attempt in range(5):
                operator.send(start(attempt))
                report = await operator.state(AgentState.RUNNING, attempt)
                ports.add(report.offered_port)
                operator.send(stop(attempt))
                await operator.report(
                    lambda r, attempt=attempt: (  # type: ignore[misc]
                        r.state is AgentState.READY and r.newest_attempt == attempt
                    )
                )
            assert len(ports) == 5, "a port was offered twice"
            assert all(20000 <= port < 30000 for port in ports if port)
            assert len(agent.processes()) == 1


@pytest.mark.parametrize(
    ("arguments", "command", "said"),
    [
        ((), stop(0, is_graceful=True, timeout_seconds=30.0), "SIGTERM"),
        (("--shutdown-signal=SIGTERM",), stop(0), "SIGTERM"),
    ],
)
async def test_workers_are_asked_before_they_are_killed(
    tmp_path: Path, arguments: tuple[str, ...], command: object, said: str
) -> None:
    with running(tmp_path, *arguments, program(tmp_path, OBEDIENT)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.workers(0)
            operator.send(command)  # type: ignore[arg-type]
            await operator.state(AgentState.READY)
            for local_rank in (0, 1):
                text = agent.attempt_file(0, local_rank, "stdout.log").read_text()
                assert text == f"up\ntold {said}\n"


async def test_who_does_not_follow_is_killed_when_the_time_is_over(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, STUBBORN)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.workers(0)
            operator.send(stop(0, is_graceful=True, timeout_seconds=0.5))
            await operator.state(AgentState.READY)


@pytest.mark.parametrize("text", [OBEDIENT, STUBBORN])
async def test_sigterm_ends_the_workers_and_then_the_agent(tmp_path: Path, text: str) -> None:
    with running(tmp_path, "--shutdown-timeout=1", program(tmp_path, text)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            workers = (await operator.workers(0)).workers
            agent.process.terminate()
            await operator.state(AgentState.SHUTDOWN)
            await operator.report(lambda report: report.has_ended)
            assert not {worker.pid for worker in workers} & set(agent.processes())
            assert await asyncio.to_thread(agent.wait) == 143
            word = b"told SIGTERM" if text is OBEDIENT else b"no"
            assert agent.stdout.all().count(word) == 2


@pytest.mark.parametrize("way", ["link", "http"])
async def test_shutdown_ends_with_0(tmp_path: Path, way: str) -> None:
    with running(tmp_path, program(tmp_path, OBEDIENT)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.workers(0)
            if way == "link":
                operator.send(ShutdownCommand())
            else:
                assert agent.request("POST", "/shutdown", b"")[:2] == (200, b"")
            assert await asyncio.to_thread(agent.wait) == 0
            await operator.until(lambda: len(operator.losses) == 1)


async def test_it_stays_after_success_and_ends_with_0_when_told(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, "print('done')")) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.state(AgentState.COMPLETED)
            assert {worker.state for worker in report.workers} == {"succeeded"}
            operator.send(stop(0))
            await operator.state(AgentState.READY)
            operator.send(start(1))
            await operator.state(AgentState.COMPLETED, 1)
            agent.process.terminate()
            assert await asyncio.to_thread(agent.wait) == 0
