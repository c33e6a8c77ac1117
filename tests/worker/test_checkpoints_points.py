"""Checkpoints of ranks that are killed before each line of a save and of a restore.

Other kills come before each access that torch makes to the directory. A complete checkpoint must
stay complete, and be restored correctly.

`make test` takes every 17th, ALL=1 each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.forked import fork, signal_at
from tests.worker.kill_points import kill_at
from tests.worker.test_checkpoints import restore, save, steps
from unbroken import worker

pytestmark = pytest.mark.slow
storm = pytest.param(1, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)])
strides = pytest.mark.parametrize("stride", [17, storm])
POINTS_MAX = 3000
Killer = Callable[[int, Path], None]


def at_line(point: int, _place: Path) -> None:
    """Before a line of ours: each write, flush, fsync, link and rename is on one of its own."""
    kill_at(point, "checkpointing/files", "checkpointing/series", "checkpointing/writing")


def at_access(point: int, place: Path) -> None:
    """Before a file of the directory is opened, renamed or removed by anybody, or it is listed."""
    signal_at(point, signal.SIGKILL, place)


def going_on(killer: Killer, point: int, place: Path, told: int) -> None:
    """Restore step 1 and save step 2, whose completion deletes step 1; until killed."""
    killer(point, place)
    saved = worker.checkpoints(place, keep=1)
    found = saved.restore(model=torch.nn.Linear(4, 4))
    assert found is not None
    assert found.step == 1
    save(saved, 2)
    assert saved.failed == 0
    os.write(told, b"2")


@strides
@pytest.mark.parametrize("killer", [at_line, at_access])
def test_killed_before_a_step_of_a_save(stride: int, killer: Killer, memory: Path) -> None:
    found: list[Any] = []
    stride = max(1, stride // 4) if killer is at_access else stride
    for point in range(1, POINTS_MAX, stride):
        place = memory / str(point)
        place.mkdir()
        save(worker.checkpoints(place), 1)
        reading, writing = os.pipe()
        child = fork(going_on, killer, point, place, writing)
        os.close(writing)
        is_through = child.has_returned()
        has_saved = os.read(reading, 1) == b"2"
        os.close(reading)
        found.append(restore(place))
        assert found[-1] == (2, 2.0) or (found[-1] == (1, 1.0) and not has_saved), point
        # Training continues, and removes the files of the killed process.
        saved = worker.checkpoints(place, keep=1)
        saved.restore()
        save(saved, 3)
        assert (restore(place), steps(place)) == ((3, 3.0), [3]), point
        assert not [name for name in os.listdir(place) if name.endswith((".tmp", ".trash"))]
        if is_through:
            break
    assert found[0] == (1, 1.0)
    assert found[-1] == (2, 2.0)
    assert point > 40, "every step of it was reached"
