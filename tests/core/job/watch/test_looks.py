"""Healthy pauses that look like hangs at two moments, distinguished by counters between looks.

The evaluation is seed 12 of `paused` on the scoreboard. Before counters were read between looks, a
look at 61 s of silence reported `no rank differs from the others: ranks 0-3 sleep in _forward
(scoreboard_pauses.py:79)`, and the job was stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.core.job.watch.drive_watch import ALL_REDUCE, IN_DATA, WatchedJob, ill, looked, well
from unbroken.core.diagnosis.stacks import blame
from unbroken.core.job.watch.examination import DISMISSED
from unbroken.core.job.watch.looks import Looks
from unbroken.core.patience import ACTIVE, BLIND, NOBODY, WORKING
from unbroken.spec.job.detectors import Detector
from unbroken.wire.observation import Activity, Bound, RankEvidence, RankWatch, ThreadStack

SILENT = Detector.SILENT
FORWARD = (
    "clock_nanosleep (libc.so.6)",
    "_forward (scoreboard_pauses.py:79)",
    "evaluate (scoreboard_pauses.py:32)",
    "main (scoreboard_train.py:176)",
)
METRIC = ("_metric (scoreboard_pauses.py:83)", *FORWARD[2:])
COUNTS = ("count (data.py:30)", "main (train.py:30)")
ON_GPU = ("cudaStreamSynchronize (libcudart.so.12)", "evaluate (train.py:9)", "main (train.py:30)")
LOOK_SECONDS = 0.5
SINCE = 10.0

Look = Callable[[int, float], RankEvidence]
"""Evidence of a rank at a time."""


def acts(
    one: RankEvidence,
    at: float,
    main: float = 0.0,
    runs: float = 0.0,
    cpu: float = 0.0,
    faults: float = 0.0,
) -> RankEvidence:
    """Return the evidence with counters that have grown by so much each second."""

    def counted(at: float) -> Activity:
        return Activity(at, at * main, int(at * runs), at * max(main, cpu), int(at * faults))

    return replace(one, activity_before=counted(at - LOOK_SECONDS), activity_after=counted(at))


def silence_of(world: int, look: Look, until: float) -> tuple[WatchedJob, float | None]:
    """Look at a job whose ranks have reported steps and are silent since 10, until a time.

    Return the job, and the silence at which it was stopped; None: it was not.
    """
    job = WatchedJob(world)
    pods = [f"w-{rank}" for rank in range(world)]
    for rank, pod in enumerate(pods):
        job.tell(pod, SINCE, well(rank, SINCE))
    for rank, pod in enumerate(pods):
        job.tell(pod, SINCE + 12, late(ill(rank, SILENT, SINCE)))
    at = SINCE + 12
    while at < until:
        for rank, pod in enumerate(pods):
            job.answer(pod, at + LOOK_SECONDS, look(rank, at + LOOK_SECONDS))
        if job.incidents:
            return job, at + LOOK_SECONDS - SINCE
        at = max(job.job.deadline() or until, at + LOOK_SECONDS)
        job.tick(at)
    return job, None


def late(watch: RankWatch) -> RankWatch:
    """Return the watch as its agent reports it from a few usual steps on."""
    return replace(
        watch, bound=Bound.STEPS.value, look_seconds=2.5, act_seconds=2.5, late_since=SINCE
    )


def evaluates(rank: int, at: float) -> RankEvidence:
    """Return evidence of half a second for each batch, then a metric."""
    return acts(looked(rank, FORWARD), at, main=0.004, runs=2)


def one_in_its_metric(rank: int, at: float) -> RankEvidence:
    frames = METRIC if (rank, int(at) % 2) == (2, 0) else FORWARD
    return acts(looked(rank, frames), at, main=0.004, runs=2)


def on_its_gpu(rank: int, at: float) -> RankEvidence:
    """Return evidence of a rank that waits in a loop that uses its processor."""
    return acts(looked(rank, ON_GPU, "R", 1.0), at, main=1.0, runs=20)


def computes(rank: int, at: float) -> RankEvidence:
    return acts(looked(rank, METRIC, "R", 1.0), at, main=0.9, runs=90)


def without_stacks(rank: int, at: float) -> RankEvidence:
    """Return evidence without stacks, as for a process whose stacks the kernel protects."""
    return replace(computes(rank, at), threads=(), is_same=None)


def with_metrics_added_up(rank: int, at: float) -> RankEvidence:
    """Return evidence in which each batch ends with a collective."""
    frames = ALL_REDUCE if (rank + int(at)) % 3 else FORWARD
    return acts(replace(looked(rank, frames), is_same=rank == 0), at, main=0.004, runs=2)


@pytest.mark.parametrize(
    ("look", "world"),
    [
        (evaluates, 4),
        (evaluates, 1),
        (one_in_its_metric, 4),
        (on_its_gpu, 4),
        (on_its_gpu, 1),
        (computes, 4),
        (computes, 1),
        (without_stacks, 4),
        (with_metrics_added_up, 4),
    ],
)
def test_an_evaluation_of_all_ranks_that_tells_nothing_is_given_half_an_hour(
    look: Look, world: int
) -> None:
    job, stopped = silence_of(world, look, WORKING.seconds)
    assert stopped is None
    (told,) = job.told(DISMISSED)
    assert "but working" in told or "waiting longer" in told


def test_an_evaluation_that_tells_nothing_for_longer_is_stopped_and_nobody_is_named() -> None:
    job, stopped = silence_of(2, evaluates, 3 * WORKING.seconds)
    assert stopped is not None
    assert WORKING.seconds <= stopped < 2 * WORKING.seconds
    assert job.incidents[1].culprit.rank is None


def test_ranks_that_do_nothing_and_wait_for_nobody_are_given_a_minute() -> None:
    job, stopped = silence_of(4, lambda rank, at: acts(looked(rank, FORWARD), at), 200)
    assert stopped is not None
    assert 60 <= stopped < 75
    assert job.incidents[1].culprit.rank is None


def test_a_look_that_did_not_end_in_time_is_not_quiet() -> None:
    def cut_short(rank: int, at: float) -> RankEvidence:
        return replace(evaluates(rank, at), activity_after=None)

    _, stopped = silence_of(4, cut_short, WORKING.seconds)
    assert stopped is None


def test_looks_that_nobody_answers_take_nothing_from_those_that_were_answered() -> None:
    """Keep answered looks, though lost answers come between them.

    In seed 2065140, half of the answers of a lone sleeping rank were lost, and each lost answer
    reset its looks.
    """
    ranks = {0: acts(looked(0, FORWARD), SINCE)}
    looks, what = Looks(), blame(list(ranks.values()), SINCE, 1)
    for number in range(1 + NOBODY.looks):
        looks.add({0: acts(looked(0, FORWARD), SINCE + 20 * number)}, what, 1, is_whole=True)
        assert looks.is_enough(what) is (number > 0)
        looks.add({}, blame([], SINCE, 1), 1, is_whole=False)
        assert looks.allowance(blame([], SINCE, 1), 1) == BLIND
    assert not looks.is_enough(what)
    looks.add({0: acts(looked(0, FORWARD), SINCE + 100)}, what, 1, is_whole=True)
    assert looks.is_enough(what)
    assert looks.allowance(what, 1).seconds < BLIND.seconds


def test_looks_that_named_nobody_are_not_enough_for_a_rank_that_is_named_once() -> None:
    """Require more than one look that names a rank.

    In seed 2231649, another fault ended the first look that showed a rank, which was blamed.
    """
    looks, nobody = Looks(), blame([looked(1), looked(2)], SINCE, 4)
    for at in (SINCE, SINCE + 20, SINCE + 40):
        looks.add({rank: acts(looked(rank), at) for rank in (1, 2)}, nobody, 4, is_whole=False)
    named = blame([looked(0, FORWARD), looked(1), looked(2)], SINCE, 4)
    assert looks.is_enough(nobody)
    assert named.ranks == (0,)
    assert not looks.is_enough(named)


def held_up_by(one: RankEvidence, **per_second: float) -> Look:
    """Return evidence in which rank 0 acts, and the others wait for it at a barrier."""

    def look(rank: int, at: float) -> RankEvidence:
        if rank:
            return acts(looked(rank), at)
        return acts(one, at, **per_second)

    return look


UPLOADS = replace(
    looked(0, ("sem_clockwait (libc.so.6)", "wait (threading.py:327)", "save (train.py:9)")),
    threads=(
        ThreadStack("MainThread", True, ("wait (threading.py:327)", "save (train.py:9)")),
        ThreadStack("upload", False, ("send (socket.py:9)", "put (store.py:9)")),
    ),
)


@pytest.mark.parametrize(
    ("look", "seconds"),
    [
        # It asks each second whether a data set is there.
        (held_up_by(looked(0, FORWARD), runs=1), ACTIVE.seconds),
        (held_up_by(looked(0, FORWARD), main=0.004, runs=2), ACTIVE.seconds),
        # Its threads write a checkpoint to a remote store.
        (held_up_by(UPLOADS, cpu=0.03), ACTIVE.seconds),
        # It counts words in one function: an endless loop takes no memory.
        (held_up_by(looked(0, COUNTS, "R", 1.0), main=1.0, runs=9, faults=200), ACTIVE.seconds),
        (held_up_by(looked(0, COUNTS, "R", 0.1), main=0.01, runs=9, faults=9), ACTIVE.seconds),
        (held_up_by(looked(0, COUNTS, "R", 1.0), main=1.0, runs=9), 30.0),
        (held_up_by(looked(0, FORWARD)), 10.0),
        (held_up_by(looked(0, IN_DATA)), 10.0),
        # A thread that waits for the GIL, or for a lock, wakes up and does nothing.
        (held_up_by(looked(0, UPLOADS.threads[0].frames), runs=1), 10.0),
    ],
)
def test_a_rank_that_others_wait_for_is_given_time_if_it_does_something(
    look: Look, seconds: float
) -> None:
    job, stopped = silence_of(4, look, 3000)
    assert stopped is not None
    assert seconds <= stopped < 2 * seconds + 10
    assert job.incidents[1].culprit.rank == 0


def test_a_rank_that_was_not_watched_between_looks_is_not_stopped() -> None:
    look = held_up_by(looked(0, FORWARD), runs=1)

    def cut_short(rank: int, at: float) -> RankEvidence:
        return replace(look(rank, at), activity_after=None)

    _, stopped = silence_of(4, cut_short, ACTIVE.seconds)
    assert stopped is None
