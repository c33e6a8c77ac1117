"""The harness of `benchmarks/recovery.py` watching real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_watch import Watch

from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
STEPS = """
import sys, time
from pathlib import Path
import train_step
report = train_step.Reporter(Path(sys.argv[1]))
for call in range(10**9):
    report.begin()
    for step in range(int(sys.argv[2])):
        report.pace(3600)
        report.step(step + 1)
        time.sleep(0.001)
"""


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Watch a new directory."""
    found = Watch(tmp_path / "job")
    found.open()
    yield found
    found.end_workers()
    found.close()


def start(watch: Watch, rank: int, steps: int = 10**9) -> subprocess.Popen[bytes]:
    """Start a worker without torch, and return once it has made a step.

    It reports as the script does. Its function is called again after `steps` steps.
    """
    folder = str(Path(__file__).parents[2] / "benchmarks")
    env = {"RANK": str(rank), "PYTHONPATH": folder}
    command = [sys.executable, "-c", STEPS, str(watch.directory), str(steps)]
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    pid = process.pid
    assert watch.wait(
        lambda: (
            (rank in watch.newest and watch.newest[rank].pid == pid)
            and watch.newest[rank].steps > 0
        ),
        PATIENCE_SECONDS,
    )
    return process


def test_a_worker_is_seen_from_its_making_to_its_collected_exit(watch: Watch) -> None:
    before = time.time()
    process = start(watch, 3)
    worker = watch.newest[3]
    assert before - 0.02 <= worker.process_at <= worker.began_at <= (worker.first_step_at or 0)
    killed_at = time.time()
    process.kill()
    assert watch.wait(lambda: worker.died_at is not None, PATIENCE_SECONDS)
    assert not watch.wait(lambda: worker.reaped_at is not None, 0.05, reaps=worker)
    process.wait()
    assert watch.wait(lambda: worker.reaped_at is not None, PATIENCE_SECONDS, reaps=worker)
    assert worker.died_at is not None
    assert worker.reaped_at is not None
    assert killed_at <= worker.died_at <= worker.reaped_at - 0.04


def test_a_new_process_of_a_rank_takes_its_place(watch: Watch) -> None:
    with start(watch, 0) as first, start(watch, 0) as second:
        assert watch.newest[0].pid == second.pid
        assert [one.pid for one in watch.workers] == [first.pid, second.pid]
        watch.end_workers()


def test_a_function_that_is_called_again_is_a_new_start_of_the_same_process(watch: Watch) -> None:
    process = start(watch, 0, steps=20)
    assert watch.wait(
        lambda: len(watch.workers) > 1 and watch.newest[0].steps > 5, PATIENCE_SECONDS
    )
    first, second = watch.workers[:2]
    assert (first.pid, first.life, second.life) == (process.pid, 0, 1)
    assert second.pid == process.pid
    assert (first.steps, first.first_step, second.first_step) == (20, 1, 1)
    assert [step for _, step in first.newest] == list(range(1, 21))
    assert first.step_at(first.newest[6][0]) == 7
    assert first.step_at(first.process_at) == 0
    killed_at = first.newest[-1][0]
    assert second.started_at(killed_at) == second.began_at > killed_at
    assert first.started_at(first.process_at - 1) == first.process_at
    watch.end_workers()
    process.wait()


def test_workers_stand_at_the_closed_gate(watch: Watch) -> None:
    with start(watch, 0):
        worker = watch.newest[0]
        watch.pause()
        watch.wait(lambda: False, 0.2)
        reached = worker.steps
        assert not watch.wait(lambda: worker.steps > reached, 0.2)
        watch.resume()
        assert watch.wait(lambda: worker.steps > reached, PATIENCE_SECONDS)
        watch.end_workers()


def test_lines_of_a_launcher_are_passed_on_whole_and_kept(watch: Watch) -> None:
    lines: list[str] = []
    watch.on_line = lambda line, at: lines.append(line)
    code = "import sys; sys.stderr.write('one\\ntw'); sys.stderr.flush(); sys.stderr.write('o\\n')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        watch.follow_lines(process.stderr, watch.directory / "log")
        assert watch.wait(lambda: len(lines) == 2, PATIENCE_SECONDS)
    assert lines == ["one", "two"]
    assert (watch.directory / "log").read_text() == "one\ntwo\n"
