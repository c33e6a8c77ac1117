"""Objects that outlive an in-process restart: when they come back, and when they are built anew."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unbroken import worker
from unbroken.errors import SpecError, WorldError
from unbroken.worker.restart import doubt, groups, keeping

Attempt = Callable[[int], None]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """Begin an attempt of a restartable function; the one before it is left."""
    monkeypatch.setattr(doubt, "_newest", -1)
    monkeypatch.setattr(groups, "_referenced", [])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    keeping.begin()

    def attempt(number: int) -> None:
        keeping.leave()
        monkeypatch.setenv("JOB_RESTART_COUNT", str(number))

    yield attempt
    keeping.end()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def test_the_same_objects_come_back_without_gradients(attempt: Attempt) -> None:
    attempt(0)
    first = worker.keep(build)
    first["model"](torch.ones(1, 4)).sum().backward()
    keeping.saved()
    for number in (1, 2, 5):
        attempt(number)
        again = worker.keep(build)
        assert again is first
        assert all(parameter.grad is None for parameter in again["model"].parameters())
        keeping.restored(is_found=True)


def test_each_name_has_objects_of_its_own(attempt: Attempt) -> None:
    attempt(0)
    one, other = worker.keep(list, name="one"), worker.keep(dict, name="other")
    with pytest.raises(SpecError, match="'one' is kept already"):
        worker.keep(list, name="one")
    assert (one, other) == ([], {})


def test_nothing_comes_back_that_no_snapshot_can_roll_back(attempt: Attempt) -> None:
    attempt(0)
    first = worker.keep(build)
    attempt(1)
    second = worker.keep(build)
    assert second is not first
    keeping.saved()
    attempt(2)
    assert worker.keep(build) is second


def test_nothing_comes_back_outside_of_a_restartable_function(attempt: Attempt) -> None:
    attempt(0)
    first = worker.keep(build)
    keeping.saved()
    keeping.end()
    assert worker.keep(build) is not first
    assert worker.keep(build) is not first, "and a name may be used again"


def test_nothing_comes_back_that_a_device_may_still_change(attempt: Attempt) -> None:
    attempt(0)
    first = worker.keep(build)
    keeping.saved()
    doubt.begin()
    attempt(1)
    assert worker.keep(build) is not first


def test_a_torn_state_is_never_taken_for_a_new_one(attempt: Attempt) -> None:
    """The restore has found nothing, and training would begin at step 0 with used weights."""
    attempt(0)
    first = worker.keep(build)
    keeping.restored(is_found=False)
    keeping.saved()
    attempt(1)
    assert worker.keep(build) is first
    with pytest.raises(WorldError, match="build them again in a new process"):
        keeping.restored(is_found=False)
    attempt(2)
    assert worker.keep(build) is not first
    keeping.restored(is_found=False)


def test_hooks_of_a_former_model_of_ddp_never_see_a_new_gradient(
    attempt: Attempt, group: None
) -> None:
    """A model that is gone, one in a cycle of objects, and one that something still refers to."""
    attempt(0)
    first = worker.keep(build)
    keeping.saved()
    parallel = DistributedDataParallel(first["model"])
    parallel(torch.ones(1, 4)).sum().backward()
    del parallel
    attempt(1)
    assert worker.keep(build) is first
    gc.disable()
    parallel = DistributedDataParallel(first["model"])
    parallel.myself = [parallel]
    del parallel
    attempt(2)
    gc.enable()
    assert worker.keep(build) is first
    parallel = DistributedDataParallel(first["model"])
    attempt(3)
    assert worker.keep(build) is not first
    del parallel


def test_a_group_that_something_refers_to_is_noticed(attempt: Attempt, tmp_path: Path) -> None:
    attempt(0)
    first = worker.keep(build)
    keeping.saved()
    url = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    mine = dist.new_group([0])
    groups.destroy()
    attempt(1)
    assert worker.keep(build) is not first
    del mine


def test_what_belongs_to_the_groups_of_one_attempt_is_refused(
    attempt: Attempt, group: None
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        return fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))

    attempt(0)
    with pytest.raises(SpecError, match="wrap it after keep"):
        worker.keep(lambda: (DistributedDataParallel(nn.Linear(4, 2)), 1))
    with pytest.raises(SpecError, match="DTensors"):
        worker.keep(lambda: [{"model": sharded()}], name="sharded")


def test_what_has_no_gradients_when_the_fault_comes_is_kept_too(attempt: Attempt) -> None:
    """Parameters that are frozen, lazy ones, and a thread that computes without gradients."""
    attempt(0)
    first = worker.keep(lambda: [nn.Linear(4, 2), nn.LazyLinear(3), nn.Linear(1, 1)])
    keeping.saved()
    first[0].requires_grad_(False)
    torch.set_grad_enabled(False)
    try:
        attempt(1)
        assert worker.keep(build) is first
    finally:
        torch.set_grad_enabled(True)
