"""torch.distributed.checkpoint with this library's writer and reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed

from tests.worker.forked import ranks
from unbroken import worker
from unbroken.worker.checkpointing.storage import CheckpointError, Superseded

pytestmark = pytest.mark.slow


def state(value: float) -> dict[str, Any]:
    """Return a state dict all of whose numbers are the same."""
    return {"model": {"a": torch.full((40, 3), value), "b": torch.full((7,), value)}, "n": value}


def loaded(place: Path | str, step: int | None = None) -> tuple[int, float]:
    """Load the newest one, or that of a step; return its step and its number."""
    reader = worker.StorageReader(place, step)
    found = state(-1.0)
    dcp.load(found, storage_reader=reader)
    values = {*found["model"]["a"].flatten().tolist(), *found["model"]["b"].tolist(), found["n"]}
    assert len(values) == 1
    return reader.step, values.pop()


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """Make a group of this process alone."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_async_save_with_one_changed_argument(scheme: str, tmp_path: Path, group: Any) -> None:
    (tmp_path / "saved").mkdir()
    place = f"{scheme}{tmp_path}/saved"
    for step in (1, 2, 3):
        dcp.async_save(
            state(step), storage_writer=worker.StorageWriter(place, step, keep=2)
        ).result()
    assert loaded(place) == (3, 3.0)
    assert loaded(place, 2) == (2, 2.0)
    with pytest.raises(FileNotFoundError, match="no step 1"):
        worker.StorageReader(place, 1)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save(state(step), storage_writer=worker.StorageWriter(tmp_path, step))
    place = tmp_path / "step-00000002.attempt-0"
    data = bytearray((place / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (place / "__0_0.distcp").write_bytes(data)
    with pytest.raises(BaseException, match="does not fit its checksum"):
        loaded(tmp_path)
    assert loaded(tmp_path, 1) == (1, 1.0)
    (place / ".metadata").write_bytes(b"")
    assert loaded(tmp_path) == (1, 1.0)


@pytest.mark.filterwarnings("ignore")
def test_an_older_attempt_saves_no_more(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=worker.StorageWriter(tmp_path, 1))
    later = worker.checkpoints(tmp_path)
    later.save(2, model=torch.nn.Linear(2, 2))
    later.wait()
    with pytest.raises(BaseException, match="has taken"):
        dcp.save(state(3), storage_writer=worker.StorageWriter(tmp_path, 3))
    assert issubclass(Superseded, CheckpointError)


def saving(rank: int, place: Path) -> None:
    """Save two steps on every rank."""
    for step in (1, 2):
        own = {**state(step), f"own-{rank}": torch.full((3,), float(rank))}
        dcp.save(own, storage_writer=worker.StorageWriter(place, step))


def reading(rank: int, place: Path) -> list[float]:
    """Load what this rank has saved."""
    found = {f"own-{rank}": torch.zeros(3)}
    dcp.load(found, storage_reader=worker.StorageReader(place))
    return found[f"own-{rank}"].tolist()


def test_all_ranks_write_their_parts(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    place.mkdir()
    ranks(2, saving, tmp_path / "store", place)
    assert sorted(os.listdir(place)) == [
        ".unbroken", "step-00000001.attempt-0", "step-00000002.attempt-0",
    ]  # fmt: skip
    assert ranks(2, reading, tmp_path / "store", place) == [[0.0] * 3, [1.0] * 3]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="positive"):
        worker.StorageWriter(tmp_path, 1, keep=0)
    with pytest.raises(CheckpointError, match="leave out checkpoint_id"):
        worker.StorageWriter(tmp_path, 1).reset("elsewhere")
