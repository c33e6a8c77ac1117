"""Workers killed at any moment, or stopped at every point of a save: the newest is whole."""

from __future__ import annotations

import os
import random
import select
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from tests.worker.forked import fork, signal_at
from tests.worker.test_checkpoints import restore, save
from unbroken import worker
from unbroken.worker.checkpointing.checkpoints import Superseded

pytestmark = pytest.mark.slow


def go_on(directory: Path, told: Connection | None = None, count: int = 1) -> None:
    """Restore, save the next step or more, and report each complete one."""
    saved = worker.checkpoints(directory, keep=1)
    found = saved.restore()
    first = found.step + 1 if found else 0
    for step in range(first, first + count):
        save(saved, step)
        assert saved.failed == 0
        if told:
            told.send(step)


def heard(told: Connection, newest: int) -> int:
    """Return the newest step that was reported complete."""
    while told.poll():
        newest = told.recv()
    return newest


def test_killed_at_any_moment_a_hundred_times(memory: Path) -> None:
    """Within writes too; each child is killed a few milliseconds after its first save."""
    chosen, newest = random.Random(5), -1
    for _ in range(100):
        told, teller = Pipe(duplex=False)
        child = fork(go_on, memory, teller, 1_000_000)
        teller.close()
        assert told.poll(20)
        # Any moment will do, none is waited for.
        select.select([], [], [], chosen.random() * 0.012)
        os.kill(child.pid, signal.SIGKILL)
        child.end()
        with suppress(EOFError):
            newest = heard(told, newest)
        told.close()
        found = restore(memory)
        assert found is not None
        assert found[0] >= newest
        assert found[0] == found[1]
        newest = found[0]
    assert newest > 100


OLD, NEW, NEXT = -1.0, 1000.0, 2000.0


def stopped_at(point: int, directory: Path) -> str:
    """Save one, as an old attempt that is stopped at a point and knows nothing of it."""
    signal_at(point, signal.SIGSTOP, directory)
    try:
        saved = worker.checkpoints(directory, keep=1)
        found = saved.restore()
        for step in range(found.step + 1 if found else 0, 12):
            save(saved, step, OLD)
            if saved.failed:
                return "could not write"
    except Superseded:
        return "superseded"
    return "through"


@pytest.mark.heavy
def test_stopped_at_every_point_an_old_attempt_changes_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, overtaken by a whole new attempt, continued: only what the new one wrote counts."""
    monkeypatch.setenv("UNBROKEN_JOB", "default/lm")
    endings: list[str] = []
    for point in range(1, 1000):
        directory = memory / str(point)
        directory.mkdir()
        monkeypatch.setenv("JOB_RESTART_COUNT", "0")
        save(worker.checkpoints(directory), 10, OLD)
        monkeypatch.setenv("JOB_RESTART_COUNT", "1")
        old = fork(stopped_at, point, directory)
        if not old.has_stopped():
            assert old.said.poll(20)
            break
        monkeypatch.setenv("JOB_RESTART_COUNT", "2")
        new = worker.checkpoints(directory, keep=1)
        found = new.restore()
        step = found.step + 1 if found else 0
        save(new, step, NEW)
        assert new.failed == 0
        os.kill(old.pid, signal.SIGCONT)
        endings.append(old.answer())
        save(new, step + 1, NEXT)
        monkeypatch.setenv("JOB_RESTART_COUNT", "3")
        assert restore(directory) == (step + 1, NEXT), (point, endings[-1], os.listdir(directory))
    assert len(endings) > 40
    assert {"superseded", "could not write"} <= set(endings)
    # These children had completed before they were stopped, and had only to tidy up.
    assert endings.count("through") < len(endings) / 3


def test_a_late_completion_does_not_count(tmp_path: Path) -> None:
    """Ignore a checkpoint that was renamed in any way after the newer attempt had begun."""
    first = worker.checkpoints(tmp_path)
    save(first, 10)
    second = worker.checkpoints(tmp_path)
    assert second.restore() is not None
    os.rename(tmp_path / "step-00000010.attempt-0", tmp_path / "step-00000099.attempt-0")
    assert restore(tmp_path) is None
