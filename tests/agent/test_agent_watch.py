"""The watchdog on real workers: what they report, and what is found when they hang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Operator, Running, linked, program, running, start, stop
from unbroken.spec.job.detectors import Detector
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.observation import RankWatch

pytestmark = pytest.mark.slow
HEAD = """
import os, signal, subprocess, sys, time
from unbroken import worker
rank = int(os.environ["RANK"])
def steps(first, count):
    for step in range(first, first + count):
        worker.progress(step, loss=1 / (step + 1))
        time.sleep(0.02)
"""
FOREVER = "steps(0, 10 ** 9)"


@pytest.fixture(scope="module", autouse=True)
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Start all stories of silence with the first test, since silence is noticed late."""
    names = {item.name.partition("[")[0] for item in request.session.items}
    wanted = SLOW if test_silence_is.__name__ in names else {}
    with ThreadPoolExecutor(len(SLOW)) as pool:
        yield {
            name: pool.submit(story, tmp_path_factory.mktemp("silence"))
            for name, story in wanted.items()
        }


def told(
    tmp_path: Path,
    text: str,
    story: Callable[[Running, Operator], Coroutine[Any, Any, None]],
    *before: str,
    nproc: int = 1,
    **changes: Any,
) -> None:
    """Run a script, and an operator's story at the same time."""

    async def main() -> None:
        async with linked(agent) as operator:
            operator.send(start(**changes))
            await story(agent, operator)

    with running(tmp_path, *before, program(tmp_path, HEAD + text), nproc=nproc) as agent:
        asyncio.run(main())


def alarms(report: AgentReport) -> list[tuple[int, str]]:
    """Return rank and detector of each alarm."""
    return [(each.rank, alarm.detector) for each in report.watch for alarm in each.alarms]


async def until(operator: Operator, holds: Callable[[RankWatch], bool], rank: int = 0) -> RankWatch:
    """Wait until `holds()` is true of a rank."""

    def found(report: AgentReport) -> list[RankWatch]:
        return [each for each in report.watch if each.rank == rank and holds(each)]

    return found(await operator.report(lambda r: bool(found(r))))[0]


async def pid_of(operator: Operator, local_rank: int = 0) -> int:
    """Return the pid of the worker."""
    report = await operator.report(lambda r: len(r.workers) > local_rank)
    return report.workers[local_rank].pid


def test_steps_are_in_the_report(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await until(operator, lambda one: (one.step or 0) > 20, rank=3)
        seen = agent.report()
        assert [one.rank for one in seen.watch] == [2, 3]
        assert all(one.metrics.keys() == {"loss"} for one in seen.watch)
        worker = seen.workers[1]
        step_at = seen.watch[1].step_at
        assert step_at is not None
        assert worker.started_at < step_at < worker.started_at + 60
        newer = await until(operator, lambda one: (one.step_at or 0) > step_at, rank=3)
        assert (newer.step or 0) > (seen.watch[1].step or 0)

    told(tmp_path, FOREVER, story, nproc=2, rank=1, nnodes=2)


def test_phases_and_checkpoints_are_in_the_report(tmp_path: Path) -> None:
    text = """
steps(0, 20)
worker.checkpoint(19)
with worker.phase("eval"):
    sys.stdin.close(); os.write(1, b"evaluates\\n")
    while not os.path.exists("go"): time.sleep(0.01)
steps(20, 10 ** 9)
"""

    async def story(agent: Running, operator: Operator) -> None:
        seen = await until(operator, lambda one: one.phase == "eval")
        assert (seen.step, seen.checkpoint_step) == (19, 19)
        (tmp_path / "go").touch()
        assert (await until(operator, lambda one: (one.step or 0) > 20)).phase == "train"

    told(tmp_path, text, story)


def test_a_stopped_worker_is_an_alarm_until_it_is_continued(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = await pid_of(operator, 1)
        await until(operator, lambda one: one.step is not None, rank=1)
        os.kill(pid, signal.SIGSTOP)
        report = await operator.report(lambda r: bool(alarms(r)))
        assert alarms(report) == [(1, "stopped")]
        assert report.state is AgentState.RUNNING
        os.kill(pid, signal.SIGCONT)
        report = await operator.report(lambda r: not alarms(r))
        assert [worker.state for worker in report.workers] == ["running", "running"]

    told(tmp_path, FOREVER, story, nproc=2)


def test_a_stopped_worker_that_is_killed_is_reaped(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        pid = await pid_of(operator)
        os.kill(pid, signal.SIGSTOP)
        await operator.report(lambda r: alarms(r) == [(0, "stopped")])
        os.kill(pid, signal.SIGKILL)
        report = await operator.state(AgentState.FAULTED)
        assert (report.faults[0].signal, alarms(report)) == (9, [])
        operator.send(stop())
        await operator.state(AgentState.READY)

    told(tmp_path, FOREVER, story)


def test_a_detector_that_is_off_raises_nothing(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        os.kill(await pid_of(operator), signal.SIGSTOP)
        seen = await until(operator, lambda one: (one.step or 0) > 150, rank=1)
        assert seen.alarms == ()
        assert not any(map(alarms, operator.reports))
        os.kill(await pid_of(operator), signal.SIGCONT)

    off = {one.value: "off" for one in Detector}
    told(tmp_path, FOREVER, story, nproc=2, detectors=off)


def test_a_worker_killed_while_it_writes_has_told_its_step(tmp_path: Path) -> None:
    text = """
for step in range(1000): worker.progress(step, loss=step)
if os.fork() == 0:
    os.kill(os.getppid(), signal.SIGKILL); os._exit(0)
while True:
    step += 1
    worker.progress(step, loss=step)
"""

    async def story(agent: Running, operator: Operator) -> None:
        report = await operator.state(AgentState.FAULTED)
        (fault,) = report.faults
        assert (fault.signal, (fault.step or 0) >= 999) == (9, True)
        assert [(one.step, one.metrics["loss"]) for one in report.watch] == [
            (fault.step, fault.step)
        ]

    told(tmp_path, text, story)


def test_the_next_attempt_begins_with_nothing_told(tmp_path: Path) -> None:
    text = """
if os.environ["JOB_RESTART_COUNT"] == "0":
    steps(7, 1)
    sys.exit(3)
os.write(1, b"up\\n")
signal.pause()
"""

    async def story(agent: Running, operator: Operator) -> None:
        report = await operator.state(AgentState.FAULTED)
        assert (report.faults[0].step, report.faults[0].exit_code) == (7, 3)
        operator.send(stop())
        report = await operator.state(AgentState.READY)
        assert report.watch == ()
        operator.send(start(1))
        await operator.workers(1)
        seen = await until(operator, lambda one: True)
        assert (seen.step, seen.metrics) == (None, {})
        operator.send(stop(1))
        await operator.state(AgentState.READY)

    told(tmp_path, text, story)


def test_a_script_in_a_shell_is_heard(tmp_path: Path) -> None:
    async def story(agent: Running, operator: Operator) -> None:
        await until(operator, lambda one: (one.step or 0) > 5)
        os.kill(await pid_of(operator), signal.SIGKILL)
        report = await operator.state(AgentState.FAULTED)
        assert (report.faults[0].step or 0) > 5

    shell = ("--no-python", "bash", "-c", f'exec 3>&1 4>&2; {sys.executable} "$0"; true')
    told(tmp_path, FOREVER, story, *shell)


def test_a_forked_loader_does_not_speak_for_its_worker(tmp_path: Path) -> None:
    text = """
for number in range(2):
    if os.fork() == 0:
        worker.phase("loads")
        steps(5000, 10 ** 9)
steps(0, 10 ** 9)
"""

    async def story(agent: Running, operator: Operator) -> None:
        await until(operator, lambda one: (one.step or 0) > 20)
        for report in operator.reports:
            assert all((one.step or 0) < 5000 and one.phase != "loads" for one in report.watch)

    told(tmp_path, text, story)


def test_a_process_stuck_in_the_kernel_is_an_alarm(tmp_path: Path) -> None:
    # Its child opens a pipe without a writer, before it becomes another program. Until then the
    # kernel does not resume the parent, whatever the signal: state D.
    text = """
os.mkfifo("pipe")
steps(0, 10)
actions = [(os.POSIX_SPAWN_OPEN, 0, "pipe", os.O_RDONLY, 0)]
os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=actions), 0)
steps(10, 10 ** 9)
"""

    async def story(agent: Running, operator: Operator) -> None:
        stuck = await until(operator, lambda one: bool(one.alarms))
        assert ([one.detector for one in stuck.alarms], stuck.step) == (["stuck"], 9)
        with (tmp_path / "pipe").open("wb"):
            freed = await until(operator, lambda one: not one.alarms)
        assert freed.step is not None

    told(tmp_path, text, story)


LEARNED = """
# Its clock is behind at first: three minutes of steps are told in two seconds.
began = time.monotonic() - 180
for index in range(360):
    worker.monotonic = lambda: began + index / 2
    worker.progress(index)
    if index == 4: time.sleep(2)
worker.monotonic = time.monotonic
"""


async def learned(operator: Operator) -> float:
    """Wait until silence would be noticed soon; return the seconds until then."""
    found = [
        await until(operator, lambda one: (one.allowed_seconds or 99.0) < 15, rank)
        for rank in range(2)
    ]
    return max(one.allowed_seconds or 0.0 for one in found)


def silence_after_a_rhythm(tmp_path: Path) -> None:
    text = """
for step in range(10 ** 9):
    steps(step, 1)
    while os.path.exists("hang"): time.sleep(0.05)
"""

    async def story(agent: Running, operator: Operator) -> None:
        await learned(operator)
        (tmp_path / "hang").touch()
        report = await operator.report(lambda r: len(alarms(r)) == 2)
        assert alarms(report) == [(0, "silent"), (1, "silent")]
        assert report.state is AgentState.RUNNING
        (tmp_path / "hang").unlink()
        await operator.report(lambda r: not alarms(r))

    told(tmp_path, LEARNED + text, story, nproc=2)


def hang_soon_after_a_restart(tmp_path: Path) -> None:
    text = """
if os.environ["JOB_RESTART_COUNT"] == "1":
    steps(0, 8)
    while True: signal.pause()
"""

    async def story(agent: Running, operator: Operator) -> None:
        await learned(operator)
        operator.send(stop())
        await operator.state(AgentState.READY)
        operator.send(start(1))
        report = await operator.report(lambda r: len(alarms(r)) == 2)
        assert alarms(report) == [(0, "silent"), (1, "silent")]
        assert all((one.step, one.phase) == (7, "train") for one in report.watch)
        assert all((one.allowed_seconds or 99) < 15 for one in report.watch)

    told(tmp_path, text + LEARNED + FOREVER, story, nproc=2)


def agent_that_stood_still(tmp_path: Path) -> None:
    text = """
step = 0
while not os.path.exists("halt"):
    steps(step, 1); step += 1
if rank == 0: os.kill(os.getppid(), signal.SIGSTOP)
while not os.path.exists("go"): time.sleep(0.05)
# Whoever looks now has seen no step for longer than is allowed.
if rank == 0: os.kill(os.getppid(), signal.SIGCONT)
time.sleep(2)
steps(step, 10 ** 9)
"""

    async def story(agent: Running, operator: Operator) -> None:
        allowed = await learned(operator)
        (tmp_path / "halt").touch()
        await operator.until(lambda: bool(operator.losses))
        lost = len(operator.reports)
        asyncio.get_running_loop().call_later(allowed + 3, (tmp_path / "go").touch)
        await operator.until(lambda: len(operator.reports) > lost)
        last = operator.reports[-1].watch[0].step or 0
        await until(operator, lambda one: (one.step or 0) > last + 100)
        assert not any(map(alarms, operator.reports))

    told(tmp_path, LEARNED + text, story, nproc=2)


SLOW = {
    "an alarm until the next step": silence_after_a_rhythm,
    "an alarm also soon after a restart": hang_soon_after_a_restart,
    "no alarm of an agent that stood still": agent_that_stood_still,
}
"""Stories of silence, which is noticed after half a minute.

All of them run at the same time, together with the other tests.
"""


@pytest.mark.parametrize("name", SLOW)
def test_silence_is(stories: dict[str, Future[None]], name: str) -> None:
    stories[name].result()
