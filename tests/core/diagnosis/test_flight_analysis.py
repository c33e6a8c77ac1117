"""Culprits in dumps of the flight recorder, compared with the truth."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import pytest

from tests.flight_dumps import VERSIONS, Groups, Recorder
from unbroken.core.diagnosis.flight_analysis import Analysis, analyse
from unbroken.wire.flight_dump import read

WORLD: Groups = {"0": ("default_pg", range(8))}
GRID: Groups = {
    "0": ("default_pg", range(8)),
    "1": ("TP", (0, 1)), "2": ("TP", (2, 3)), "3": ("TP", (4, 5)), "4": ("TP", (6, 7)),
    "5": ("DP", (0, 2, 4, 6)), "6": ("DP", (1, 3, 5, 7)),
}  # fmt: skip


def tensor(rank: int) -> str:
    return str(1 + rank // 2)


def data(rank: int) -> str:
    return str(5 + rank % 2)


def job(groups: Groups = WORLD, size: int = 8) -> list[Recorder]:
    found = [Recorder(rank, groups) for rank in range(size)]
    for one in found:
        one.call(count=10)
    return found


def look(recorders: Sequence[Recorder]) -> Analysis:
    return analyse({one.rank: read(one.pickle()) for one in recorders})


def told(analysis: Analysis) -> tuple[tuple[int, ...], str, str]:
    first = analysis.causes[0] if analysis.causes else None
    return analysis.culprits(), first.confidence if first else "", first.kind if first else ""


def one_late(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank != 3:
            one.call(state="started")


def two_late(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank not in (3, 5):
            one.call(state="scheduled")


def late_by_different_counts(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank != 5:
            one.call()
        if one.rank not in (3, 5):
            one.call(state="scheduled")


def chain(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank == 7:
            continue
        one.call(tensor(one.rank), state="scheduled" if one.rank == 6 else "completed")
        if one.rank != 6:
            one.call(data(one.rank), state="scheduled")


def two_in_a_grid(ranks: list[Recorder]) -> None:
    """GPUs of ranks 4 and 6 fail: 4 has an operation that ended, 6 still waits in its last one."""
    for one in ranks:
        group = tensor(one.rank)
        if one.rank == 4:
            one.call(group, state="scheduled", retired=True)
        elif one.rank == 6:
            one.call(group, state="scheduled")
        elif one.rank in (5, 7):
            one.call(group, state="scheduled", count=2).call(data(one.rank), state="scheduled")
        else:
            one.call(group).call(data(one.rank), state="scheduled")


def fails_in_the_call(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank == 2:
            one.fail()
        else:
            one.call(state="scheduled")


def other_operation(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(operation="broadcast" if one.rank == 6 else "all_reduce", state="started")


def other_size(ranks: list[Recorder]) -> None:
    for one in ranks:
        sizes = [[7]] if one.rank == 1 else [[1024, 4]]
        one.call(state="started", input_sizes=sizes, output_sizes=sizes)


def other_type(ranks: list[Recorder]) -> None:
    for one in ranks:
        types = ["Float"] if one.rank == 1 else ["BFloat16"]
        one.call(state="started", input_dtypes=types, output_dtypes=types)


def half_and_half(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(operation="broadcast" if one.rank < 4 else "all_reduce", state="started")


def went_on_after_another_operation(ranks: list[Recorder]) -> None:
    for one in ranks:
        if one.rank == 0:
            one.call(operation="broadcast").call(state="started")
        else:
            one.call(state="started")


def no_dump(ranks: list[Recorder]) -> None:
    one_late(ranks)
    del ranks[3]


def everything_done(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call()


def all_in_it(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(state="scheduled")


def one_gpu_has_not_begun(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(state="scheduled" if one.rank == 4 else "started")


def one_has_not_completed(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(state="started" if one.rank == 4 else "completed")


def orders_differ(ranks: list[Recorder]) -> None:
    """Rank 6 calls its DP collective before the others of TP do; in the grid each waits."""
    for one in ranks:
        if one.rank == 6:
            one.call("5", state="scheduled")
        elif one.rank in (0, 2, 4):
            one.call("0", state="scheduled")
        else:
            one.call("0", state="scheduled")


def receive_without_send(ranks: list[Recorder]) -> None:
    ranks[1].pair("0", "recv 1<-6", "started")


def pairs_that_meet(ranks: list[Recorder]) -> None:
    ranks[1].pair("0", "recv 1<-6", "started")
    ranks[6].pair("0", "send 6->1", "started")


def batches(ranks: list[Recorder]) -> None:
    """Parts of a batch stay `scheduled`; the batch has completed."""
    for one in ranks:
        one.call(operation="_all_gather_base", state="scheduled")
        one.part("0", "ALLGATHER_coalesced", "completed")
    one_late(ranks)


def uneven_sizes(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.call(operation="all_to_all", input_sizes=[[one.rank]], state="started")
        if one.rank != 2:
            one.call(state="scheduled")


def lost_by_the_buffer(ranks: list[Recorder]) -> None:
    for one in ranks:
        one.capacity = 50
        one.call(count=100 + one.rank % 3 * 0)
    one_late(ranks)


@pytest.mark.parametrize(
    ("build", "groups", "answer"),
    [
        (one_late, WORLD, ((3,), "certain", "not-called")),
        (two_late, WORLD, ((3, 5), "certain", "not-called")),
        (late_by_different_counts, WORLD, ((3, 5), "certain", "not-called")),
        (chain, GRID, ((7,), "certain", "not-called")),
        (two_in_a_grid, GRID, ((4, 6), "certain", "not-called")),
        (fails_in_the_call, WORLD, ((2,), "certain", "not-called")),
        (other_operation, WORLD, ((6,), "certain", "mismatch")),
        (went_on_after_another_operation, WORLD, ((0,), "certain", "mismatch")),
        (other_size, WORLD, ((1,), "likely", "mismatch")),
        (other_type, WORLD, ((1,), "likely", "mismatch")),
        (half_and_half, WORLD, (tuple(range(8)), "unsure", "mismatch")),
        (no_dump, WORLD, ((3,), "likely", "no-dump")),
        (everything_done, WORLD, ((), "", "")),
        (all_in_it, WORLD, ((), "unsure", "stuck")),
        (one_gpu_has_not_begun, WORLD, ((4,), "likely", "stuck")),
        (one_has_not_completed, WORLD, ((4,), "likely", "stuck")),
        (orders_differ, GRID, ((6,), "likely", "deadlock")),
        (receive_without_send, WORLD, ((6,), "likely", "not-called")),
        (pairs_that_meet, WORLD, ((), "unsure", "stuck")),
        (batches, WORLD, ((3,), "certain", "not-called")),
        (uneven_sizes, WORLD, ((2,), "certain", "not-called")),
        (lost_by_the_buffer, WORLD, ((3,), "certain", "not-called")),
    ],
)
def test_the_culprits_are_named(
    build: Callable[[list[Recorder]], None],
    groups: Groups,
    answer: tuple[tuple[int, ...], str, str],
) -> None:
    ranks = job(groups)
    build(ranks)
    assert told(look(ranks)) == answer


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "write", [Recorder.pickle, Recorder.json, lambda one: pickle.dumps(one.value())]
)
def test_every_form_of_a_dump_says_the_same(
    version: str, write: Callable[[Recorder], bytes]
) -> None:
    ranks = job(GRID)
    chain(ranks)
    for one in ranks:
        one.version = version
    found = analyse({one.rank: read(write(one)) for one in ranks})
    assert told(found) == ((7,), "certain", "not-called")
    assert [wait.name() for wait in found.waits] == [
        "all_reduce 1 of group 4 (TP)", "all_reduce 1 of group 5 (DP)",
        "all_reduce 1 of group 6 (DP)",
    ]  # fmt: skip


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    halves: list[Groups] = [{"a": ("half", (0, 1))}, {"a": ("half", (2, 3))}]
    ranks = [Recorder(rank, halves[rank // 2]) for rank in range(4)]
    for one in ranks:
        one.call("a")
    ranks[0].call("a", state="scheduled")
    found = look(ranks)
    assert told(found) == ((1,), "certain", "not-called")
    assert [group.members for group in found.groups] == [(0, 1), (2, 3)]


def test_a_rank_that_never_called_in_a_group_is_no_missing_dump() -> None:
    ranks = [Recorder(rank, WORLD) for rank in range(8)]
    for one in ranks:
        if one.rank != 2:
            one.call(state="scheduled")
    value = ranks[2].value()
    assert value["entries"] == []
    assert told(look(ranks)) == ((2,), "certain", "not-called")
