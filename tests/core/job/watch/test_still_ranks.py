"""Ranks that keep the others waiting and do not move from look to look."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.job.watch.drive_watch import IN_DATA, WatchedJob, looked, well
from unbroken.core.diagnosis.rank_activity import activities_of
from unbroken.core.job.watch.looks import StillRanks
from unbroken.core.job.watch.looks import still_ranks as compared
from unbroken.core.patience import ALL_WAIT, CHECKPOINT, COMPILING, SLOW, STUCK
from unbroken.wire.observation import Bound, RankEvidence, RankWatch, ThreadStack

HOLDER = ThreadStack("holder", False, ("pause (libc.so.6)", "pausing (train.py:7)"), holds_gil=True)
FOR_GIL = ("pthread_cond_timedwait (libc.so.6)", "time_sleep (python)", "train (train.py:9)")
SPIN = ("step (train.py:9)",)
ON_GPU = ("cudaStreamSynchronize (libcudart.so.12)", "step (train.py:9)")
IN_STORE = ("wait (torch/distributed/rendezvous.py:9)", "step (train.py:9)")
BARRIER = ("barrier (torch/distributed/distributed_c10d.py:4000)", "train (train.py:30)")
STOP = "stop w-0 in 0 keep, stop w-1 in 0 keep, incident 1 open"


def frames(*native: str) -> tuple[str, ...]:
    """A stack that ends in the user's function `load`."""
    return (*native, "load (train.py:5)", "train (train.py:20)")


def gil(rank: int = 1) -> RankEvidence:
    """A rank whose main thread waits for the GIL that another thread holds."""
    found = looked(rank, FOR_GIL)
    return replace(found, threads=(*found.threads, HOLDER))


def still_ranks(
    before: StillRanks | None, evidence: list[RankEvidence], world: int
) -> StillRanks | None:
    """Compare a look with those before it."""
    ranks = {one.rank: one for one in evidence}
    return compared(before, ranks, activities_of(ranks), world)


def looks(*pairs: RankEvidence, count: int = 3, world: int = 2) -> StillRanks | None:
    """Repeat a look `count` times; rank 0 waits in a collective."""
    found = None
    for _ in range(count):
        found = still_ranks(found, [looked(0), *pairs], world)
    return found


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        (looked(1, IN_DATA), 0.0),
        (gil(), 0.0),
        (looked(1, frames("sem_clockwait (libc.so.6)")), 0.0),
        (looked(1, IN_DATA, "T"), 0.0),
        (looked(1, frames("read (libc.so.6)")), SLOW.seconds),
        (looked(1, frames("__libc_recv (libc.so.6)")), SLOW.seconds),
        (looked(1, SPIN, "R", 1.0), SLOW.seconds),
        (looked(1, frames(), "D"), STUCK.seconds),
        (looked(1, frames("save (torch/serialization.py:9)")), CHECKPOINT.seconds),
        (looked(1, frames("compile (torch/_dynamo/convert_frame.py:9)")), COMPILING.seconds),
    ],
)
def test_what_a_rank_waits_for_says_how_long_it_is_given(
    seen: RankEvidence, seconds: float
) -> None:
    found = looks(seen)
    assert found is not None
    assert (found.ranks, found.allowance.seconds) == ((1,), seconds)
    assert found.is_certain(seconds)
    assert not found.is_certain(seconds - 1)


def test_a_collective_of_the_users_own_is_known_by_its_name() -> None:
    def own(rank: int) -> RankEvidence:
        return looked(rank, ("recv (socket.py:9)", "receive (group.py:5)", "all_reduce (g.py:7)"))

    away = [own(0), own(1), looked(2, IN_DATA)]
    found = still_ranks(still_ranks(None, away, 3), away, 3)
    assert found is not None
    assert (found.ranks, found.is_certain(0.0)) == ((2,), True)
    # Few that listen in such a function may listen to a server.
    few = [own(0), looked(1, IN_DATA), looked(2, IN_DATA)]
    assert still_ranks(None, few, 3) is None


@pytest.mark.parametrize(
    ("last", "seconds"), [(looked(1), ALL_WAIT.seconds), (looked(1, BARRIER), SLOW.seconds)]
)
def test_ranks_that_all_wait_for_each_other_hang_and_none_is_named(
    last: RankEvidence, seconds: float
) -> None:
    found = looks(last)
    assert found is not None
    assert (found.ranks, found.allowance.seconds) == ((), seconds)
    assert found.is_certain(seconds)
    assert not found.is_certain(seconds - 1)
    moved = still_ranks(found, [looked(0), replace(last, step=8)], 2)
    assert moved is not None
    assert moved.looks == 1


def test_one_look_is_never_certain() -> None:
    found = looks(looked(1, IN_DATA), count=1)
    assert found is not None
    assert not found.is_certain(1e9)


@pytest.mark.parametrize(
    "after",
    [
        looked(1),
        looked(1, ("elsewhere (train.py:30)", "train (train.py:20)")),
        replace(looked(1, IN_DATA), is_same=False),
        replace(looked(1, IN_DATA), is_same=None),
        replace(looked(1, IN_DATA), step=8),
        replace(looked(1, IN_DATA), io_bytes=10**6),
        replace(looked(1, IN_DATA), last_output_at=20.0),
        replace(looked(1, IN_DATA), phase="eval"),
        replace(looked(1, IN_DATA), pid=7),
        replace(looked(1, IN_DATA), threads=()),
        replace(looked(1, IN_DATA), cpu_share=0.9),
    ],
)
def test_whatever_moves_between_two_looks_is_no_hang(after: RankEvidence) -> None:
    found = still_ranks(looks(looked(1, IN_DATA), count=1), [looked(0), after], 2)
    assert found is None or found.looks == 1


def test_a_step_of_any_rank_begins_anew() -> None:
    first = still_ranks(None, [looked(0), looked(1, IN_DATA)], 2)
    found = still_ranks(first, [replace(looked(0), step=5), looked(1, IN_DATA)], 2)
    assert found is not None
    assert found.looks == 1


def test_ranks_that_meet_in_the_store_wait_for_each_other_but_never_hang_for_certain() -> None:
    seen = [looked(0), looked(1, IN_STORE)]
    first = still_ranks(None, seen, 2)
    again = still_ranks(first, seen, 2)
    assert again is not None
    assert (again.is_mutual, again.looks, again.ranks) == (True, 2, ())
    assert not again.is_certain(1e9)
    assert not again.is_certain(1e9, repeats=4.0)


@pytest.mark.parametrize(
    "seen",
    [
        [looked(0), looked(1, share=0.5)],
        [looked(0), replace(looked(1), io_bytes=10**6)],
        [looked(0, ON_GPU), looked(1, ON_GPU)],
        [looked(0, IN_DATA), looked(1, IN_DATA)],
        [looked(0), looked(1, IN_DATA), looked(2, IN_DATA)],
        [looked(0)],
        [looked(0), looked(1, IN_DATA, "t")],
        [looked(0), looked(1, IN_DATA), looked(2), RankEvidence(3, 7, "")],
    ],
)
def test_nothing_is_certain_where_few_wait_or_a_rank_is_missing(seen: list[RankEvidence]) -> None:
    assert still_ranks(None, seen, max(2, len(seen))) is None


def late(rank: int, since: float, act: float = 5.0, bound: Bound = Bound.STEPS) -> RankWatch:
    """A rank that has shown nothing since then."""
    return replace(
        well(rank, since), bound=bound.value, look_seconds=3.0, act_seconds=act, late_since=since
    )


def start(rank: int = 1) -> RankWatch:
    """Return a rank that reports nothing and has no rhythm."""
    return RankWatch(rank, "startup", bound=Bound.START.value)


def asked(*watch: RankWatch, modes: str = "") -> WatchedJob:
    """A job of two ranks, whose rank 0 has been late since 10 and is looked at from 14 on."""
    job = WatchedJob(modes=modes)
    job.tell("w-1", 10, RankWatch(1))
    assert job.tell("w-0", 14, late(0, 10)) == "look w-0, look w-1"
    job.tell("w-1", 14, *watch)
    job.answer("w-0", 15, looked(0))
    return job


def test_two_looks_that_are_alike_name_the_rank_before_all_are_silent() -> None:
    job = asked(late(1, 10))
    assert job.answer("w-1", 15, looked(1, IN_DATA)) == ""
    assert job.tick(job.job.deadline() or 0) == "look w-0, look w-1"
    job.answer("w-0", 20, looked(0))
    assert job.answer("w-1", 20, looked(1, IN_DATA)) == STOP
    found = job.incidents[1]
    assert (found.culprit.rank, found.confidence) == (1, "certain")
    assert found.culprit.text.endswith("no rank made progress for 10 s")


def test_a_job_whose_ranks_all_wait_for_a_lost_message_is_restarted_without_a_name() -> None:
    job = asked(late(1, 10))
    orders: list[str] = []
    at = 15.0
    while at < 10 + 2 * ALL_WAIT.seconds and not job.incidents:
        job.answer("w-0", at, looked(0))
        orders.append(job.answer("w-1", at, looked(1)))
        at = max(at, job.job.deadline() or at) + 1
        orders.append(job.tick(at))
    assert orders[-2] == STOP or orders[-1] == STOP, orders
    found = job.incidents[1]
    assert (found.culprit.rank, found.confidence) == (None, "unsure")
    assert 10 + ALL_WAIT.seconds <= at <= 10 + ALL_WAIT.seconds + 20


def test_a_rank_that_tells_nothing_is_named_by_those_who_wait_for_it() -> None:
    job = asked(start())
    job.answer("w-1", 15, gil())
    job.tick(19)
    job.answer("w-0", 20, looked(0))
    assert job.answer("w-1", 20, gil()) == STOP
    assert "rank 1 holds the GIL (thread holder) in pausing" in job.incidents[1].blame
    assert job.incidents[1].culprit.evidence[1] == "pausing (train.py:7)"


def again(job: WatchedJob, at: float, seen: RankEvidence) -> str:
    """One more look."""
    job.tick(at)
    job.answer("w-0", at + 1, looked(0))
    return job.answer("w-1", at + 1, seen)


@pytest.mark.parametrize(
    "watch",
    [
        replace(well(1, 10), phase="eval", bound=Bound.START.value),
        replace(well(1, 14), bound=Bound.STEPS.value, look_seconds=30.0),
        late(1, 10, act=500.0),
    ],
)
def test_a_rank_in_a_new_phase_or_within_its_usual_silence_is_let_be(watch: RankWatch) -> None:
    job = asked(watch)
    job.answer("w-1", 15, looked(1, IN_DATA))
    for at in range(20, 400, 10):
        assert again(job, at, looked(1, IN_DATA)) == ""
    assert again(job, 620, looked(1, IN_DATA)) == (STOP if watch.look_seconds != 30.0 else "")


def test_a_rank_that_works_is_looked_at_ever_more_rarely() -> None:
    job = asked(start())
    busy = replace(looked(1, SPIN, "R", 1.0), is_same=False)
    job.answer("w-1", 15, busy)
    times = []
    for _ in range(6):
        at = job.job.deadline()
        assert at is not None
        times.append(at)
        assert again(job, at, busy) == ""
    assert all(b - 10 >= 1.9 * (a - 10) for a, b in itertools.pairwise(times))
    assert job.incidents == {}


def test_a_spin_is_given_half_a_minute_and_three_looks() -> None:
    job = asked(start())
    spin = looked(1, SPIN, "R", 1.0)
    job.answer("w-1", 15, spin)
    ends = []
    while not job.incidents:
        at = job.job.deadline()
        assert at is not None
        assert at < 60
        again(job, at, spin)
        ends.append(at + 1)
    assert len(ends) >= 2
    assert 40 <= ends[-1] <= 50
    assert job.incidents[1].culprit.fault == "Spinning"


def test_a_silence_that_may_not_act_is_not_looked_at() -> None:
    job = WatchedJob(modes="silent=warn")
    job.tell("w-1", 10, late(1, 10))
    assert job.tell("w-0", 14, late(0, 10)) == ""


def test_a_rank_that_is_late_no_more_ends_it() -> None:
    job = asked(start())
    job.answer("w-1", 15, looked(1, IN_DATA))
    job.tell("w-0", 15.5, well(0, 15.5))
    assert job.job.deadline() is None
    assert job.tick(100) == ""
    assert job.tell("w-0", 200, late(0, 190)) == "look w-0, look w-1"
    job.answer("w-0", 201, looked(0))
    assert job.answer("w-1", 201, looked(1, IN_DATA)) == "", "what was seen before is forgotten"


def test_looks_of_a_busy_machine_are_given_more_time_and_forget_nothing() -> None:
    job = asked(late(1, 10))
    job.answer("w-1", 15, looked(1, IN_DATA))
    unread = replace(looked(1), threads=(), is_same=None)
    assert again(job, 16, unread) == ""
    assert again(job, 22, looked(1, IN_DATA)) == STOP


SEEN = st.sampled_from(
    [
        looked(1),
        looked(1, IN_DATA),
        gil(),
        looked(1, SPIN, "R", 1.0),
        replace(looked(1, IN_DATA), is_same=False),
        replace(looked(1), threads=()),
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(SEEN, min_size=1, max_size=12))
def test_only_looks_in_a_row_that_are_alike_are_certain(seen: list[RankEvidence]) -> None:
    found = None
    for one in seen:
        found = still_ranks(found, [looked(0), one], 2)
    if found is not None and found.is_certain(0.0):
        assert seen[-1] == seen[-2]
        assert found.ranks == (1,)
