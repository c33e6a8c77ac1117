"""Checkpoints of several ranks: real groups, replicas, shards, and ranks that are lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.worker.forked import group, ranks, signal_at
from tests.worker.test_checkpoints import flip, steps
from unbroken import worker
from unbroken.worker.checkpointing.checkpoints import CheckpointError

pytestmark = pytest.mark.slow


def trained(sharded: bool) -> tuple[Any, Any]:
    """Return a model and its optimizer after one step; equal for any number of ranks."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    model: Any = DistributedDataParallel(plain)
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = fully_shard(plain, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return all weights and moments, unsharded."""
    found = [*model.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.detach() for one in found]


def saving(rank: int, directory: Path, sharded: bool, per_node: bool = False) -> Any:
    """Save steps 1 and 2; return the state of step 2."""
    place = directory / f"node-{rank // 2}" if per_node else directory
    model, optimizer = trained(sharded)
    saved = worker.checkpoints(place, shared=not per_node)
    for step in (1, 2):
        assert saved.save(step, model=model, optimizer=optimizer, extra={"rank": rank})
        saved.wait()
        torch.distributed.barrier()
    assert saved.failed == 0
    return [one.tolist() for one in values(model, optimizer)]


def restoring(rank: int, directory: Path, sharded: bool, per_node: bool = False) -> Any:
    """Restore over weights of zero; return step, extras and state."""
    place = directory / f"node-{rank // 2}" if per_node else directory
    model, optimizer = trained(sharded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saved = worker.checkpoints(place, shared=not per_node)
    found = saved.restore(model=model, optimizer=optimizer)
    if found is None:
        return None
    return found.step, found.extra, [one.tolist() for one in values(model, optimizer)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_shards_come_back_on_another_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    saved = ranks(before, saving, tmp_path / "store", directory, True)
    found = ranks(after, restoring, tmp_path / "store", directory, True)
    for rank, (step, extra, state) in enumerate(found):
        assert (step, state) == (2, saved[0])
        assert extra == {"rank": rank if rank < before else 0}


def test_replicas_are_written_once(tmp_path: Path) -> None:
    ranks(2, saving, tmp_path / "store", tmp_path, False)
    place = tmp_path / "step-00000002.attempt-0"
    metadata = torch.distributed.checkpoint.FileSystemReader(place).read_metadata()
    weights = [index for index in metadata.storage_data if index.fqn == "model.0.weight"]
    assert len(weights) == 1
    found = ranks(2, restoring, tmp_path / "store", tmp_path, False)
    assert found[0][2] == found[1][2]


def test_all_ranks_take_the_older_where_a_part_of_one_is_damaged(tmp_path: Path) -> None:
    saved = ranks(2, saving, tmp_path / "store", tmp_path, True)
    flip(tmp_path / "step-00000002.attempt-0" / "__1_0.distcp")
    found = ranks(2, restoring, tmp_path / "store", tmp_path, True)
    assert [(step, state) for step, _, state in found] == [(1, saved[0])] * 2
    assert (tmp_path / "step-00000002.attempt-0.bad").is_dir()


def test_each_node_may_have_a_directory_of_its_own(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
    saved = ranks(4, saving, tmp_path / "store", tmp_path, True, True, per_node=2)
    found = ranks(4, restoring, tmp_path / "store", tmp_path, True, True, per_node=2)
    assert [step for step, _, _ in found] == [2] * 4
    assert all(state == saved[0] for _, _, state in found)
    # One node misses the newest: all take the one before.
    os.rename(
        tmp_path / "node-1" / "step-00000002.attempt-0",
        tmp_path / "node-1" / "step-00000002.attempt-0.bad",
    )
    found = ranks(4, restoring, tmp_path / "store", tmp_path, True, True, per_node=2)
    assert [step for step, _, _ in found] == [1] * 4


def mistaken(rank: int, directory: Path) -> str:
    """Give each rank another directory, though it is said to be shared."""
    place = directory / str(rank)
    place.mkdir()
    with pytest.raises(CheckpointError) as caught:
        worker.checkpoints(place).restore()
    return str(caught.value)


def test_a_directory_that_is_not_shared_is_told(tmp_path: Path) -> None:
    told = ranks(2, mistaken, tmp_path / "store", tmp_path)
    assert all("is not the same directory as that of rank 0" in text for text in told)


def staying(rank: int, directory: Path) -> Any:
    """Go on in a second attempt: rank 0 with the object that it has, rank 1 as a new process."""
    model, optimizer = trained(True)
    saved = worker.checkpoints(directory)
    for step in (0, 1):
        assert not saved.is_due(step)
        assert saved.save(step, model=model, optimizer=optimizer)
        saved.wait()
    torch.distributed.barrier()
    os.environ["JOB_RESTART_COUNT"] = "1"
    if rank == 1:
        saved = worker.checkpoints(directory)
    found = saved.restore(model=model, optimizer=optimizer)
    assert found is not None
    for step in (2, 3):
        assert not saved.is_due(step)
        assert saved.save(step, model=model, optimizer=optimizer)
        saved.wait()
    return found.step


def test_a_process_that_stays_begins_a_later_attempt_with_the_new_ones(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    assert ranks(2, staying, tmp_path / "store", saved) == [1, 1]
    assert {one.name for one in saved.glob("step-*")} == {
        "step-00000002.attempt-1", "step-00000003.attempt-1",
    }  # fmt: skip


def completing(rank: int, directory: Path) -> list[int]:
    """Save three checkpoints; return the newest that this rank has completed after each."""
    saved, completed = worker.checkpoints(directory), []
    for step in (1, 2, 3):
        assert saved.save(step, model=torch.nn.Linear(2, 2))
        saved.wait()
        torch.distributed.barrier()
        completed.append(saved.completed)
    return completed


def test_one_rank_says_that_it_has_completed_a_checkpoint(tmp_path: Path) -> None:
    found = ranks(3, completing, tmp_path / "store", tmp_path)
    for before, step in enumerate((1, 2, 3)):
        newest = [completed[before] for completed in found]
        assert newest.count(step) == 1
        assert all(-1 <= one <= step for one in newest)


def lost(rank: int, directory: Path) -> None:
    """Kill rank 1 while it writes step 2."""
    model, optimizer = trained(True)
    saved = worker.checkpoints(directory)
    assert saved.save(1, model=model, optimizer=optimizer)
    saved.wait()
    torch.distributed.barrier()
    if rank == 1:
        signal_at(1, signal.SIGKILL, directory / "step-00000002.attempt-0.tmp" / "__1_0.distcp")
    assert saved.save(2, model=model, optimizer=optimizer)
    saved.wait()


def test_without_one_rank_nothing_is_complete(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    directory.mkdir()
    survivor, victim = group(2, lost, tmp_path / "store", directory)
    assert os.WTERMSIG(victim.end()) == signal.SIGKILL
    survivor.end()
    assert steps(directory) == [1]
    found = ranks(2, restoring, tmp_path / "store", directory, True)
    assert [step for step, _, _ in found] == [1, 1]
    ranks(2, going_on, tmp_path / "store", directory)
    assert sorted(os.listdir(directory)) == [".unbroken", "step-00000002.attempt-2"]


def going_on(rank: int, directory: Path) -> None:
    """Save step 2 again."""
    model, optimizer = trained(True)
    saved = worker.checkpoints(directory, keep=1)
    assert saved.restore(model=model, optimizer=optimizer)
    assert saved.save(2, model=model, optimizer=optimizer)
    saved.wait()


def due(rank: int, directory: Path) -> list[int]:
    """Return the steps at which a save is due; the steps of rank 1 take three times as long."""
    saved = worker.checkpoints(directory, seconds=0.05)
    model, found = torch.nn.Linear(100 + 200 * rank, 3000), []
    for step in range(400):
        model(torch.ones(4, model.in_features))
        if saved.is_due(step):
            found.append(step)
            saved.save(step, model=torch.nn.Linear(2, 2))
    saved.wait()
    return found


def test_all_ranks_agree_when_a_save_is_due(tmp_path: Path) -> None:
    one, other = ranks(2, due, tmp_path / "store", tmp_path)
    assert one == other
    assert len(one) > 1


def test_a_group_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="init_process_group"):
        worker.checkpoints(tmp_path).restore()
