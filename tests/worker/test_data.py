"""Data whose position is kept: each sample of an epoch is taken once, whatever happens."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.worker.snapshot_agents import channel
from unbroken import worker
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.errors import SpecError
from unbroken.worker.loading.loaders import Data
from unbroken.worker.loading.positions import Division, Position


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


class Shuffled(Sampler[int]):
    """A sampler that draws from Python's generator."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self._size), self._size))


def data_of(size: int, batch: int, rank: int, ranks: int, **settings: Any) -> Data:
    loader = DataLoader(Numbers(size), batch, **{"shuffle": True, **settings})
    return worker.data(loader, rank=rank, world_size=ranks)


def taken(ranks: Sequence[Data], steps: int | None = None) -> list[tuple[int, list[list[int]]]]:
    """Return the epoch and each rank's batch of some steps, or of the rest of the epoch."""
    rows = zip(*(islice(iter(one), steps) for one in ranks), strict=True)
    return [(ranks[0].epoch, [batch.tolist() for batch in row]) for row in rows]


def flat(steps: Sequence[tuple[int, list[list[int]]]]) -> list[int]:
    return [one for _, row in steps for batch in row for one in batch]


sizes = st.integers(1, 60)
worlds = st.integers(1, 9)
batches = st.integers(1, 5)


@given(sizes, st.lists(st.tuples(worlds, batches, st.integers(0, 6)), min_size=1, max_size=6))
def test_each_sample_of_an_epoch_is_taken_once_while_the_ranks_change(
    size: int, runs: list[tuple[int, int, int]]
) -> None:
    position, seen = Position(), Counter[tuple[int, int]]()
    for ranks, batch, steps in runs:
        division = Division(size, ranks, batch)
        if division.step(0) == 0:
            continue
        position = position.start(division)
        for first, end in islice(division.steps(position.done), steps):
            shares = [range(first, end)[rank::ranks] for rank in range(ranks)]
            assert all(1 <= len(share) <= batch + 1 for share in shares)
            seen.update((position.epoch - (at < 0), at % size) for share in shares for at in share)
            position = Position(position.epoch, end)
    wanted = position.epoch * size + position.done
    assert seen == Counter(divmod(number, size) for number in range(wanted))


@given(sizes, worlds, batches)
def test_ranks_that_stay_leave_no_sample_for_the_next_epoch(
    size: int, ranks: int, batch: int
) -> None:
    ends = [end for _, end in Division(size, ranks, batch).steps(0)]
    assert ends[-1:] == ([size] if size >= ranks else [])


@given(sizes, worlds, batches)
def test_only_samples_that_fill_no_step_are_left_out_where_the_loader_says_so(
    size: int, ranks: int, batch: int
) -> None:
    division = Division(size, ranks, batch, drop_last=True)
    ends = [end for _, end in division.steps(0)]
    assert ends == list(range(ranks * batch, size + 1, ranks * batch))
    last = Position(3, ends[-1] if ends else 0)
    assert last.start(division) == Position(4, 0)


@given(sizes, worlds, batches, st.integers(0, 3))
def test_an_epoch_is_that_of_a_distributed_sampler(
    size: int, ranks: int, batch: int, epoch: int
) -> None:
    size = size * ranks * batch
    sampler: DistributedSampler[int] = DistributedSampler(
        Numbers(size), num_replicas=ranks, rank=ranks - 1, seed=7
    )
    sampler.set_epoch(epoch)
    wanted = [batch.tolist() for batch in DataLoader(Numbers(size), batch, sampler=sampler)]
    ours = data_of(size, batch, ranks - 1, ranks, shuffle=None, sampler=sampler)
    while ours.epoch < epoch:
        list(ours)
    assert [batch.tolist() for batch in ours] == wanted


PREPARING = [
    (0, False),
    pytest.param(2, False, marks=pytest.mark.slow),
    pytest.param(2, True, marks=pytest.mark.slow),
]
"""Number of loader processes, and whether they outlive an epoch."""


@pytest.mark.parametrize(("workers", "is_kept_alive"), PREPARING)
def test_prepared_batches_that_were_not_handed_out_are_not_counted(
    workers: int, is_kept_alive: bool
) -> None:
    settings = {"num_workers": workers, "persistent_workers": is_kept_alive}
    ranks = [data_of(50, 4, rank, 2, **settings) for rank in range(2)]
    before = taken(ranks, 3)
    state = ranks[0].state_dict()
    assert state == ranks[1].state_dict()
    assert state["done"] == state["samples"] == 24
    # Batches that a fault has taken back: three more are handed out, and more are prepared.
    taken(ranks, 3)
    for one in ranks:
        one.load_state_dict(state)
    assert sorted(flat(before) + flat(taken(ranks))) == list(range(50))
    assert [one.epoch for one in ranks] == [1, 1]
    assert sum(one.samples for one in ranks) == 50


@pytest.mark.slow
def test_data_need_no_collector_of_cycles_to_end_their_loader_processes() -> None:
    data = data_of(20, 2, 0, 1, num_workers=1, persistent_workers=True)
    reference = weakref.ref(data._loader)
    gc.disable()
    try:
        taken([data], 1)
        del data
        assert reference() is None
    finally:
        gc.enable()


def test_other_ranks_take_what_is_left_of_an_epoch() -> None:
    seen = []
    state = None
    for size, steps in ((4, 3), (3, 2), (4, None)):
        ranks = [data_of(103, 4, rank, size) for rank in range(size)]
        if state is not None:
            for one in ranks:
                one.load_state_dict(state)
        seen += flat(taken(ranks, steps))
        (state,) = {tuple(one.state_dict().items()): one.state_dict() for one in ranks}.values()
    assert sorted(seen) == list(range(103))


def test_samples_that_are_fewer_than_new_ranks_are_taken_with_the_next_epoch() -> None:
    few = [data_of(9, 2, rank, 3) for rank in range(3)]
    first = taken(few, 1)
    many = [data_of(9, 1, rank, 4) for rank in range(4)]
    for one in many:
        one.load_state_dict(few[0].state_dict())
    assert [one.epoch for one in many] == [1] * 4
    seen = Counter(flat(first) + flat(taken(many)))
    assert seen == dict.fromkeys(range(9), 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"shuffle": False},
        {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        {"sampler": Shuffled(40)},
        {"sampler": RandomSampler(Numbers(40), generator=torch.Generator().manual_seed(3))},
        {"sampler": WeightedRandomSampler([1.0] * 40, 40)},
    ],
)
def test_an_order_depends_on_the_epoch_alone_and_leaves_the_generators_as_they_are(
    settings: dict[str, Any],
) -> None:
    settings = {"shuffle": None, **settings}
    first = data_of(40, 5, 0, 1, **settings)
    epochs = [flat(taken([first])) for _ in range(3)]
    random.seed(99)
    torch.manual_seed(99)
    again = data_of(40, 5, 0, 1, **settings)
    state = (random.getstate(), torch.get_rng_state().tolist())
    again.load_state_dict({**first.state_dict(), "epoch": 2, "order": again._orders.checksum(2)})
    assert (random.getstate(), torch.get_rng_state().tolist()) == state
    assert flat(taken([again])) == epochs[2]
    assert (epochs[0] == epochs[1]) == (settings["shuffle"] is False)


class OfTorchdata(RandomSampler):
    """A sampler that makes itself a generator with a random seed, as that of torchdata."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        made = generator or torch.Generator().manual_seed(random.randrange(2**40))
        super().__init__(Numbers(40), generator=made)


OfTorchdata.__module__ = "torchdata.stateful_dataloader.sampler"


def test_a_seed_that_a_sampler_has_drawn_by_itself_is_not_used() -> None:
    def order(sampler: OfTorchdata, **settings: Any) -> list[int]:
        return flat(taken([data_of(40, 5, 0, 1, shuffle=None, sampler=sampler, **settings)]))

    drawn = order(OfTorchdata())
    assert drawn == order(OfTorchdata())
    generator = torch.Generator().manual_seed(3)
    assert order(OfTorchdata(generator), generator=generator) != drawn


def test_a_position_of_other_data_is_refused() -> None:
    state = data_of(40, 4, 0, 1).state_dict()
    other = data_of(41, 4, 0, 1)
    other.load_state_dict(state)
    with pytest.raises(SpecError, match="the data have 41 samples, and had 40"):
        next(iter(other))
    other = data_of(40, 4, 0, 1, generator=torch.Generator().manual_seed(1))
    other.load_state_dict(state)
    with pytest.raises(SpecError, match="gives another order of epoch 0"):
        other.epoch  # noqa: B018


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "takes a DataLoader, not a list"),
        (DataLoader(Numbers(4), batch_size=None), "give the loader batch_size="),
        (
            DataLoader(
                Numbers(4),
                batch_sampler=type("Own", (BatchSampler,), {})(
                    SequentialSampler(Numbers(4)), 2, False
                ),
            ),
            r"no batch_sampler \(Own\)",
        ),
        (
            DataLoader(Numbers(4), sampler=type("Ours", (Shuffled,), {"num_replicas": 2})(4)),
            "Ours does so, too",
        ),
    ],
)
def test_a_loader_whose_samples_cannot_be_divided_is_refused(loader: Any, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        worker.data(loader)


def test_data_with_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(SpecError, match="have 3 samples, and 4 ranks need at least 4"):
        list(data_of(3, 2, 0, 4))
    with pytest.raises(SpecError, match="have 7 samples, and 4 ranks need at least 8"):
        list(data_of(7, 2, 0, 4, drop_last=True))


def test_a_later_attempt_begins_anew_unless_it_restores(
    as_worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = worker.data(DataLoader(Numbers(20), 4))
    assert flat(taken([data], 2)) == list(range(8))
    state = data.state_dict()
    monkeypatch.setenv("JOB_RESTART_COUNT", "1")
    assert (data.samples, data.epoch, data.state_dict()["done"]) == (0, 0, 0)
    assert flat(taken([data], 1)) == list(range(4))
    monkeypatch.setenv("JOB_RESTART_COUNT", "2")
    data.load_state_dict(state)
    assert flat(taken([data])) == list(range(8, 20))


def test_a_snapshot_keeps_the_position(
    as_worker: None, memories: list[SnapshotSlots], monkeypatch: pytest.MonkeyPatch
) -> None:
    with channel(memories[0]) as line:
        data = worker.data(DataLoader(Numbers(20), 4))
        snapshot = worker.Snapshot(data=data, channel=line)
        for step, _ in enumerate(islice(data, 3)):
            assert snapshot.save(step)
        taken([data], 1)
        snapshot.close()
        monkeypatch.setenv("JOB_RESTART_COUNT", "1")
        again = worker.data(DataLoader(Numbers(20), 4))
        found = worker.Snapshot(data=again, channel=line).restore()
    assert found is not None
    assert found.step == 2
    assert flat(taken([again])) == list(range(12, 20))


def test_a_checkpoint_keeps_the_position(as_worker: None, tmp_path: Path) -> None:
    data, saved = worker.data(DataLoader(Numbers(20), 4)), worker.checkpoints(tmp_path)
    taken([data], 3)
    assert saved.save(2, data=data)
    taken([data], 1)
    saved.wait()
    again = worker.data(DataLoader(Numbers(20), 4))
    found = worker.checkpoints(tmp_path).restore(data=again)
    assert found is not None
    assert flat(taken([again])) == list(range(12, 20))
