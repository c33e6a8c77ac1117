"""Streams whose position is kept: each sample of an epoch is taken once, whatever happens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unbroken import worker
from unbroken.errors import SpecError
from unbroken.worker.loading.streams import Stream, Told


class Sharded(IterableDataset[int]):
    """Numbers in shards, which loader processes would divide."""

    def __init__(self, shards: Sequence[range]) -> None:
        self._shards = shards

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self._shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        place = (info.id, info.num_workers) if info else (0, 1)
        for shard in self._shards[place[0] :: place[1]]:
            yield from shard


class Plain(IterableDataset[int]):
    """Numbers without shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


class Meeting:
    """Ranks in threads, which exchange messages as those of a process group do."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=300)
        self._told: dict[int, Told] = {}

    def gather(self, told: Told) -> Sequence[Told]:
        """Exchange a message."""
        self._told[told[1]] = told
        self._barrier.wait()
        found = [self._told[rank] for rank in sorted(self._told)]
        self._barrier.wait()
        return found


State = dict[str, Any]


def run(
    dataset: Any, ranks: int, batch: int, steps: int | None, state: State | None
) -> tuple[list[list[list[int]]], State]:
    """Make steps of one epoch; return the batches of each rank, and the position of all ranks."""
    meeting = Meeting(ranks)

    def trained(rank: int) -> tuple[list[list[int]], State]:
        loader = DataLoader(dataset, batch)
        data = Stream(loader, (rank, ranks), meeting.gather)
        if state is not None:
            data.load_state_dict(state)
        made = [one.tolist() for one in islice(iter(data), steps)]
        return made, data.state_dict()

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(trained, range(ranks)))
    states = [state for _, state in found]
    assert all(one == states[0] for one in states)
    return [made for made, _ in found], states[0]


def shards_of(sizes: Sequence[int]) -> list[range]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_of_an_epoch_is_taken_once_while_the_ranks_change(
    sizes: list[int], batch: int, runs: list[tuple[int, int]]
) -> None:
    seen: Counter[int] = Counter()
    state = None
    for ranks, steps in [*runs, (1, None)]:
        made, state = run(Sharded(shards_of(sizes)), ranks, batch, steps, state)
        assert len({len(one) for one in made}) == 1, "ranks have made other numbers of steps"
        assert all(1 <= len(one) <= batch + 1 for rank in made for one in rank)
        seen.update(number for rank in made for one in rank for number in one)
        if state["epoch"]:
            break
    left_out = sum(sizes) - len(seen)
    assert seen == Counter(seen.keys())
    assert seen.keys() <= set(range(sum(sizes)))
    assert left_out < max([1, *(ranks for ranks, _ in runs)])
    assert state is not None
    assert state["samples"] == sum(seen.values())
    ranks = [ranks for ranks, _ in runs]
    if sum(sizes) >= max([1, *ranks]) and ranks == sorted(ranks, reverse=True):
        assert left_out == 0


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Sharded(shards_of([7, 30, 0, 12, 9, 21])), Plain()])
def test_loader_processes_divide_nothing_a_second_time(dataset: Any) -> None:
    # One rank: threads must not start loader processes at the same time, by forks.
    first = worker.data(DataLoader(dataset, 3, num_workers=2))
    seen = [number for batch in islice(iter(first), 4) for number in batch.tolist()]
    rest = worker.data(DataLoader(dataset, 3, num_workers=2))
    rest.load_state_dict(first.state_dict())
    seen += [number for batch in rest for number in batch.tolist()]
    size = sum(1 for _ in dataset)
    assert sorted(seen) == list(range(size))
    assert (rest.epoch, rest.samples) == (1, size)


def test_a_rank_reads_its_own_shards_while_there_are_enough() -> None:
    shards = shards_of([10, 10, 10, 10])
    made, state = run(Sharded(shards), 2, 5, 3, None)
    assert made == [[[*range(5)], [*range(5, 10)], [*range(20, 25)]],
                    [[*range(10, 15)], [*range(15, 20)], [*range(30, 35)]]]  # fmt: skip
    assert state["shards"] == [-1, -1, 5, 5]


def test_the_warning_says_how_many_samples_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    _, state = run(Sharded(shards_of([8])), 2, 3, 1, None)
    made, state = run(Sharded(shards_of([8])), 3, 3, None, state)
    assert made == [[], [], []]
    assert "2 samples of epoch 0 are fewer than 3 ranks" in caplog.text
    assert state["epoch"] == 1


def test_a_position_of_other_shards_is_refused() -> None:
    _, state = run(Sharded(shards_of([8, 8])), 1, 3, 1, None)
    with pytest.raises(SpecError, match="the data have 3 shards, and had 2"):
        run(Sharded(shards_of([8, 8, 1])), 1, 3, 1, state)


class Drawn(Sharded):
    """A dataset that Hugging Face shuffles by a generator."""

    def __init__(self, shards: Sequence[range], seed: int | None) -> None:
        super().__init__(shards)
        buffer = SimpleNamespace(generator=numpy.random.default_rng(seed))
        self._ex_iterable = SimpleNamespace(ex_iterable=SimpleNamespace(ex_iterables=[buffer]))


def test_a_stream_that_is_shuffled_without_a_seed_is_refused() -> None:
    shards = shards_of([9, 9])
    _, state = run(Drawn(shards, 3), 1, 2, 2, None)
    assert run(Drawn(shards, 3), 1, 2, 1, state)
    with pytest.raises(SpecError, match=r"than when its position was kept: give its shuffle\(\) a"):
        run(Drawn(shards, None), 1, 2, 1, state)


def test_ranks_with_streams_in_other_orders_are_refused() -> None:
    meeting = Meeting(2)

    def first(rank: int) -> Any:
        loader = DataLoader(Drawn(shards_of([9, 9]), None), 2)
        return next(iter(Stream(loader, (rank, 2), meeting.gather)))

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(first, rank) for rank in range(2)]:
            with pytest.raises(SpecError, match="another order on each rank"):
                one.result()


class Split(Plain):
    """A dataset that `datasets.distributed.split_dataset_by_node` has divided."""

    _distributed = (0, 2)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Plain(), batch_size=None), "give the loader batch_size="),
        (DataLoader(Plain(), 2, drop_last=True), "no drop_last=True"),
        (DataLoader(Split(), 2), "without split_dataset_by_node"),
    ],
)
def test_a_stream_that_cannot_be_divided_is_refused(loader: Any, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        worker.data(loader)


def test_a_group_is_needed_before_the_loop(
    as_worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = worker.data(DataLoader(Sharded(shards_of([8, 8])), 2))
    with pytest.raises(SpecError, match=r"call torch\.distributed\.init_process_group"):
        next(iter(data))


@pytest.mark.slow
def test_a_reader_can_be_sent_to_another_process() -> None:
    loader = DataLoader(Plain(), 4, num_workers=1, multiprocessing_context="spawn")
    assert torch.cat(list(worker.data(loader))).tolist() == list(range(50))
