"""Blame for a job that hangs, from real and from made-up stacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.diagnosis.rank_activity import activity_of
from unbroken.core.diagnosis.stacks import GROUPS_MAX, RANGES_CHARACTERS, Blame, blame, ranges
from unbroken.wire.observation import Collective, RankEvidence, ThreadStack

STACKS = Path(__file__).parent / "stacks"
"""Folder of py-spy 0.4's output of two ranks with torch 2.13 on gloo.

It has stacks with and without native frames.
"""


def recorded(name: str, way: str) -> list[RankEvidence]:
    """Return the evidence as an agent would have sent it."""
    ranks = json.loads((STACKS / f"{name}.json").read_text())[way]
    return [
        RankEvidence(
            rank,
            100 + rank,
            state="R" if one["active"] else "S",
            waits_in=one["waits_in"],
            cpu_share=float(one["active"]),
            is_same=True,
            threads=tuple(
                ThreadStack(thread["name"], not number, tuple(thread["frames"]))
                for number, thread in enumerate(one["threads"])
            ),
        )
        for rank, one in enumerate(ranks)
    ]


def at(rank: int, *frames: str, state: str = "S", **more: object) -> RankEvidence:
    """Return a rank whose main thread has these frames, innermost first."""
    threads = (ThreadStack("MainThread", True, frames),) if frames else ()
    found = RankEvidence(rank, 100 + rank, state, cpu_share=0.0, is_same=True, threads=threads)
    return replace(found, **more)  # type: ignore[arg-type]


MAIN = ("train (train.py:40)", "<module> (train.py:90)")
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3252)", *MAIN)
BARRIER = ("barrier (torch/distributed/distributed_c10d.py:5356)", *MAIN)
GATHER = ("all_gather (torch/distributed/distributed_c10d.py:4287)", *MAIN)
GPU = ("cudaStreamSynchronize (libcudart.so.12)", *MAIN)
SPIN = ("spin (train.py:12)", *MAIN)


@pytest.mark.parametrize(
    ("name", "way", "waits", "culprit"),
    [
        ("sleep", "native", "waits in all_reduce", "sleeps in get_batch (train.py:8)"),
        ("sleep", "python", "waits in all_reduce", "waits in get_batch (train.py:8)"),
        ("lock", "native", "waits in all_reduce", "waits for a lock in deadlock (train.py:13)"),
        ("lock", "python", "waits in all_reduce", "waits for a lock in deadlock (train.py:13)"),
        ("barrier", "python", "waits in barrier", "waits for a lock in deadlock (train.py:13)"),
        ("spin", "native", "waits in all_reduce", "computes in spin (train.py:11)"),
        ("spin", "python", "waits in all_reduce", "computes in spin (train.py:11)"),
        ("spincpp", "native", "waits in all_reduce", "computes in <module> (train.py:78)"),
        ("loader", "native", "waits in all_reduce",
         "waits for a DataLoader worker in <module> (train.py:24)"),
        ("loader", "python", "waits in all_reduce",
         "waits for a DataLoader worker in <module> (train.py:24)"),
        ("loader0", "native", "waits in all_reduce", "sleeps in Slow.__getitem__ (train.py:19)"),
        ("ddp", "native", "waits in all_reduce (backward)", "sleeps in <module> (train.py:31)"),
        ("ddp", "python", "waits in the backward pass", "sleeps in <module> (train.py:31)"),
        ("fsdp", "native", "waits in FSDP (foreach_all_gather)",
         "sleeps in <module> (train.py:68)"),
        ("async", "native", "waits in a collective", "sleeps in get_batch (train.py:8)"),
        ("monitored", "python", "waits in monitored_barrier", "sleeps in get_batch (train.py:8)"),
        ("object", "native", "waits in all_gather", "sleeps in get_batch (train.py:8)"),
        ("store", "native", "in the store (rendezvous)", "sleeps in get_batch (train.py:8)"),
        ("save", "native", "waits in barrier",
         "reads or writes a checkpoint in <module> (train.py:59)"),
        ("subprocess", "python", "waits in barrier",
         "waits for a child process in <module> (train.py:54)"),
    ],
)  # fmt: skip
def test_real_stacks(name: str, way: str, waits: str, culprit: str) -> None:
    found = blame(recorded(name, way), 100)
    assert found.ranks == (1,)
    assert found.confidence == "certain"
    assert found.why == f"rank 1 {culprit}, while rank 0 {waits}"
    assert [group.doing for group in found.groups] == [culprit, waits]
    assert [group.is_outlier for group in found.groups] == [True, False]
    assert found.is_spinning == (name in ("spin", "spincpp"))
    assert not found.is_working


def test_different_collectives_are_nobodys_but_are_both_told() -> None:
    found = blame(recorded("mismatch", "python"), 100)
    assert (found.ranks, found.confidence) == ((0, 1), "unsure")
    assert "all_reduce" in found.why
    assert "broadcast" in found.why


ONE_OTHER = [at(rank, *REDUCE) for rank in range(3)]
RECEIVE = ("recv (socket.py:9)", "receive (group.py:50)")
RECEIVING = [at(rank, *RECEIVE, "reduce (group.py:70)", *MAIN) for rank in range(3)]
HUB = [
    at(0, *RECEIVE, "_collect (group.py:80)", "reduce (group.py:70)", *MAIN),
    *(at(r, *RECEIVE, "_exchange (group.py:90)", "reduce (group.py:71)", *MAIN) for r in (1, 2)),
]


@pytest.mark.parametrize(
    ("evidence", "ranks", "confidence", "why"),
    [
        ([*ONE_OTHER, at(3, *REDUCE, state="T")], (3,), "certain", "stopped by a signal"),
        ([*ONE_OTHER, at(3, *REDUCE, state="t")], (3,), "likely", "stopped by a debugger"),
        ([*ONE_OTHER, at(3, state="Z")], (3,), "certain", "has ended"),
        ([*ONE_OTHER, at(3, state="")], (3,), "certain", "has ended"),
        ([*ONE_OTHER, at(3, *SPIN, state="D", waits_in="fuse_wait")], (3,), "likely",
         "in the kernel (D) in fuse_wait, called in spin (train.py:12)"),
        ([at(r, *SPIN, state="D", waits_in="nfs_wait") for r in (0, 1)], (), "unsure",
         "every rank is stuck in the kernel"),
        ([*ONE_OTHER, at(3, *GPU)], (), "unsure", "network or a GPU"),
        ([*ONE_OTHER, at(3, *BARRIER)], (3,), "likely", "different collectives"),
        ([at(0, *REDUCE), at(1, *GATHER), at(2, *BARRIER)], (0, 1, 2), "unsure", "different"),
        ([*ONE_OTHER, at(3, *SPIN), at(4, "get (queue.py:9)", *MAIN)], (3, 4), "likely", "while"),
        ([at(0, *REDUCE), *(at(r, *SPIN) for r in (1, 2, 3))], (1, 2, 3), "unsure", "while"),
        ([at(r, *REDUCE, step=9 - (r == 1)) for r in range(3)], (1,), "unsure", "at step 8"),
        ([at(0, *SPIN), at(1, *SPIN), at(2, "get (queue.py:9)", *MAIN)], (2,), "unsure", "unlike"),
        ([*RECEIVING, at(3, *RECEIVE, "barrier (group.py:60)", *MAIN)], (3,), "likely",
         "different collectives were called: ranks 0-2 wait in reduce and rank 3 waits in barrier"),
        ([*HUB, at(3, *RECEIVE, "barrier (group.py:60)", *MAIN)], (3,), "likely", "different"),
        # Rank 0 collects what the others send: that is no reason to blame it.
        (HUB, (), "unsure", "network or a GPU"),
        ([*RECEIVING, at(3, *RECEIVE, "reduce (group.py:99)", *MAIN)], (), "unsure",
             "network or a GPU"),
        ([*ONE_OTHER, at(3, REDUCE[0], "eval (train.py:70)", *MAIN)], (3,), "likely",
         "rank 3 waits in all_reduce, called by eval (train.py:70)"),
        ([at(0, *SPIN)], (0,), "certain", "only rank"),
        ([at(2, *SPIN)], (), "unsure", "ranks 0-1 could not be examined"),
        ([], (), "", "no rank"),
    ],
)  # fmt: skip
def test_order_of_what_counts(
    evidence: list[RankEvidence], ranks: tuple[int, ...], confidence: str, why: str
) -> None:
    found = blame(evidence, 100)
    assert (found.ranks, found.confidence) == (ranks, confidence)
    assert why in found.why


def test_a_rank_that_was_not_looked_at_is_told_and_not_blamed() -> None:
    found = blame(ONE_OTHER, 100, world=4)
    assert found.ranks == ()
    assert found.why.endswith("; rank 3 could not be examined")


def on(
    group: str, sequence: int, state: str = "started", operation: str = "nccl:all_reduce"
) -> Collective:
    return Collective(group, sequence, operation, state)


@pytest.mark.parametrize(
    ("collectives", "ranks", "confidence"),
    [
        ([(on("w", 7),), (on("w", 7),), (on("w", 6, "completed"),)], (2,), "likely"),
        # Rank 1 is late in the whole world since rank 3 keeps it in their own group.
        ([(on("w", 7),), (on("w", 6, "completed"), on("tp", 5)), (on("w", 7),),
          (on("w", 6, "completed"), on("tp", 4, "completed"))], (3,), "likely"),
        ([(on("w", 7),)] * 3, (), "unsure"),
        ([(on("w", 7, operation="nccl:send 0->1"),), (on("w", 3, operation="nccl:recv 0<-1"),)],
         (), "unsure"),
    ],
)  # fmt: skip
def test_flight_recorder(
    collectives: list[tuple[Collective, ...]], ranks: tuple[int, ...], confidence: str
) -> None:
    evidence = [at(rank, *GPU, collectives=those) for rank, those in enumerate(collectives)]
    found = blame(evidence, 100)
    assert (found.ranks, found.confidence) == (ranks, confidence)


def test_the_flight_recorder_names_the_collective_that_no_stack_tells() -> None:
    assert activity_of(at(0, *GPU, collectives=(on("w", 7),))).words == "waits for the GPU"
    assert activity_of(at(0, *MAIN, collectives=(on("w", 7),))).words == "waits in all_reduce"
    assert activity_of(at(0, *MAIN, collectives=(on("w", 7, "completed"),))).words == "waits"


@pytest.mark.parametrize(
    ("one", "is_working", "is_spinning"),
    [
        (at(0, *SPIN, cpu_share=1.0, state="R"), False, True),
        (at(0, *SPIN, cpu_share=1.0, state="R", is_same=False), True, False),
        (at(0, *SPIN, io_bytes=10_000_000), True, False),
        (at(0, *SPIN, io_bytes=1_000), False, False),
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=3.0), True, False),
        (at(0, *SPIN), False, False),
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=0.15), True, False),
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=0.05), False, False),
        # On a busy machine.
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=0.05, waited_share=0.9), True, False),
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=0.05, waited_share=0.4), False, False),
        # A compiler at the lowest priority, on a machine that is busy with other work.
        (at(0, "do_wait", *MAIN, cpu_share=0.003, waited_share=0.95), True, False),
        (at(0, "get (queue.py:9)", *MAIN, cpu_share=0.01, waited_share=0.4), False, False),
        (at(0, *SPIN, cpu_share=0.1, state="R"), False, True),
        # A rank that waits for its peers does no work of its own, whatever its threads do.
        (at(0, *REDUCE, cpu_share=1.0, is_same=False, io_bytes=10_000_000), False, False),
        (at(0, *GPU, cpu_share=1.0), False, False),
        (at(0, *SPIN, state="T", is_same=False), False, False),
        (at(0, *SPIN, state="D", waits_in="nfs", io_bytes=10_000_000), True, False),
    ],
)
def test_second_opinion(one: RankEvidence, is_working: bool, is_spinning: bool) -> None:
    found = blame([one, at(1, *REDUCE)], 100)
    assert (found.is_working, found.is_spinning) == (is_working, is_spinning)


def test_a_pipe_is_no_file() -> None:
    reading = at(0, "read (libc.so.6)", "next_batch (loader.py:7)", *MAIN)
    assert activity_of(reading).words == "reads files"
    piped = activity_of(replace(reading, waits_in="anon_pipe_read"))
    assert (piped.words, piped.where) == ("waits for a pipe", "next_batch")


def numbers(blamed: Blame) -> list[int]:
    """Return every rank of its groups."""
    found: list[int] = []
    for group in blamed.groups:
        for part in group.ranks.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


frames = st.sampled_from([REDUCE, BARRIER, GATHER, GPU, SPIN, MAIN, (), ("x",), ("f (a.py:1)",)])
anything = st.builds(
    lambda stack, state, share, is_same: (stack, state, share, is_same),
    frames, st.sampled_from("RSDTtZ"), st.none() | st.floats(0, 4), st.none() | st.booleans(),
)  # fmt: skip


@given(st.lists(anything, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_groups_partition_the_ranks_and_order_says_nothing(
    those: list[tuple[tuple[str, ...], str, float | None, bool | None]], random: object
) -> None:
    evidence = [
        at(rank, *stack, state=state, cpu_share=share, is_same=is_same)
        for rank, (stack, state, share, is_same) in enumerate(those)
    ]
    found = blame(evidence, 100)
    assert sorted(numbers(found)) == list(range(len(evidence)))
    assert len(found.groups) <= GROUPS_MAX
    assert set(found.ranks) <= set(range(len(evidence)))
    random.shuffle(evidence)  # type: ignore[attr-defined]
    assert blame(evidence, 100) == found


@given(
    st.integers(3, 40), st.data(), st.sampled_from([REDUCE, BARRIER, GPU]),
    st.sampled_from([SPIN, ("get (queue.py:9)", *MAIN), ("f (a.py:1)",)]),
)  # fmt: skip
def test_a_planted_outlier_is_found_whatever_the_noise(
    size: int, data: st.DataObject, waiting: tuple[str, ...], stack: tuple[str, ...]
) -> None:
    culprit = data.draw(st.integers(0, size - 1))
    noise = data.draw(st.lists(st.floats(0, 2), min_size=size, max_size=size))
    lines = data.draw(st.lists(st.integers(1, 99), min_size=size, max_size=size))
    evidence = []
    for rank in range(size):
        frames = stack if rank == culprit else waiting
        moved = [frame.replace("(train.py:40)", f"(train.py:{lines[rank]})") for frame in frames]
        evidence.append(at(rank, *moved, cpu_share=noise[rank], step=lines[rank]))
    assert blame(evidence, 100).ranks == (culprit,)


def test_a_large_job_is_told_in_few_words() -> None:
    evidence = [at(rank, *(SPIN if rank % 7 == 3 else REDUCE)) for rank in range(32_000)]
    found = blame(evidence, 100)
    assert len(found.ranks) == len(range(3, 32_000, 7))
    assert sum(group.count for group in found.groups) == 32_000
    assert all(len(group.ranks) < RANGES_CHARACTERS + 20 for group in found.groups)
    assert len(found.why) <= 500


def test_ranges() -> None:
    assert ranges([5, 0, 2, 1]) == "0-2,5"
    assert ranges([]) == ""
    assert ranges(range(0, 9999, 2)).endswith(",...")


def test_a_worker_that_was_started_warm_waits_for_the_store_by_its_own_client() -> None:
    frames = (
        "poll (libc.so.6)",
        "sock_connect (socketmodule.c:3330)",
        "create_connection (socket.py:836)",
        "await_listening (unbroken/worker/boot/rendezvous.py:115)",
        "_connect (unbroken/worker/boot/rendezvous.py:90)",
        "patient.<locals>.make (unbroken/worker/boot/rendezvous.py:77)",
        "pybind11_meta_call (libtorch_python.so)",
        "_create_c10d_store (torch/distributed/rendezvous.py:199)",
        "init_process_group (torch/distributed/distributed_c10d.py:1892)",
        "<module> (train.py:9)",
    )
    assert activity_of(at(1, *frames)).words == "in the store (rendezvous)"
