"""Ranks killed before each operation of a store: nothing broken is read, nothing good is lost.

`make test-processes` takes every 5th, ALL=1 each.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.worker import stores
from tests.worker.forked import fork
from tests.worker.test_checkpoints import save
from unbroken import worker

pytestmark = pytest.mark.slow
storm = pytest.param(1, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)])
POINTS_MAX = 500


def going_on(point: int, url: str, told: int = -1) -> tuple[int, float, int]:
    """Restore, save the next step with weights of its number; return what was restored."""
    stores.register()
    stores.kill_at(point, "list", "get", *stores.CHANGES)
    saved, model = worker.checkpoints(url, keep=1), torch.nn.Linear(4, 4)
    found = saved.restore(model=model)
    values = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    assert found is None or len(values) == 1, "the state is of more than one step"
    step = found.step if found else 0
    save(saved, step + 1)
    if told >= 0 and not saved.failed:
        os.write(told, b"2")
    return step, max(values) if found else 0.0, saved.failed


@pytest.mark.parametrize("stride", [5, storm])
@pytest.mark.parametrize("scheme", ["oci", "hdfs"])
def test_killed_before_an_operation_of_a_save(scheme: str, stride: int, memory: Path) -> None:
    found, is_through, point = [], False, 1
    while not is_through:
        url = f"{scheme}://{memory}/{point}"
        assert fork(going_on, 0, url).answer() == (0, 0.0, 0)
        reading, writing = os.pipe()
        child = fork(going_on, point, url, writing)
        os.close(writing)
        is_through = child.has_returned()
        has_saved = os.read(reading, 1) == b"2"
        os.close(reading)
        step, value, failed = fork(going_on, 0, url).answer()
        assert (value, failed) == (step, 0), point
        assert step == 2 or (step == 1 and not has_saved), point
        left = {path.name.partition(".")[0] for path in (memory / str(point)).glob("step-*")}
        assert left == {f"step-{step + 1:08}"}, point
        found.append(step)
        point += stride
        assert point < POINTS_MAX
    assert found[0] == 1
    assert found[-1] == 2
    assert point > 40, "every operation of it was reached"
