"""Fixtures for tests of snapshots and checkpoints: a worker, agents with memory, a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.worker.snapshot_agents import PLENTY
from unbroken.agent.snapshots.slots import SnapshotSlots


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only worker of a job, with one thread of torch."""
    variables = {"UNBROKEN_JOB": "job", "RANK": 0, "WORLD_SIZE": 1, "JOB_RESTART_COUNT": 0}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Provide a directory in memory if possible: the tests are not about the disk."""
    place = Path("/dev/shm")
    with TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture
def memories() -> Iterator[list[SnapshotSlots]]:
    """Provide the memory of the agents of four nodes."""
    found = [SnapshotSlots(lambda: PLENTY) for _ in range(4)]
    yield found
    for one in found:
        one.close()
