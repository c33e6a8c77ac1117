"""A rank that makes all others slow is found by how rarely it waits for them."""

from __future__ import annotations

import random

import pytest

from tests.core.job.watch.drive_watch import WatchedJob, ill, well
from unbroken.core.job.watch.examination import SAMPLES_MIN, SURVEY_SECONDS, stragglers
from unbroken.core.job.watch.stalls import COMPARE_SECONDS
from unbroken.core.job.watch.unreached import GRACE_SECONDS
from unbroken.spec.job.detectors import Detector
from unbroken.wire.observation import RankEvidence

SLOW = Detector.SLOW
NOBODY = "no rank differs from the others"


def sampled(rank: int, waiting: int, samples: int = 60) -> RankEvidence:
    """A rank that waited in so many of its samples."""
    return RankEvidence(rank, 100 + rank, samples=samples, waiting=waiting)


def slow_job(mode: str, nodes: int = 3) -> WatchedJob:
    """A job whose ranks all became slow, with a survey under way since 22."""
    job = WatchedJob(nodes, modes=f"slow={mode}")
    pods = [f"w-{rank}" for rank in range(nodes)]
    for rank, pod in enumerate(pods[:-1]):
        job.tell(pod, 20, ill(rank, SLOW, 18))
    asked = job.tell(pods[-1], 20, ill(nodes - 1, SLOW, 18))
    assert asked == ", ".join(f"sample {pod}" for pod in pods)
    return job


def test_the_rank_for_which_the_others_wait_is_named() -> None:
    job = slow_job("warn")
    job.answer("w-0", 40, sampled(0, 29))
    job.answer("w-1", 40, sampled(1, 1))
    assert job.answer("w-2", 40, sampled(2, 31)) == ""
    assert job.told("SlowSteps") == [
        "rank 1: it is slow; the other ranks wait for rank 1: in 48% of 20 s, it in 2%"
    ]
    assert job.incidents == {}


def test_where_the_detector_may_act_the_straggler_is_the_culprit() -> None:
    job = slow_job("act")
    job.answer("w-0", 40, sampled(0, 29))
    job.answer("w-1", 40, sampled(1, 1))
    assert job.answer("w-2", 40, sampled(2, 31)).startswith("stop w-0 in 0")
    culprit = job.incidents[1].culprit
    assert (culprit.rank, culprit.pod, culprit.node) == (1, "j-w-1", "n1")


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([(29, 60), (28, 60), (31, 60)], id="all wait alike"),
        pytest.param([(1, 60), (2, 60), (9, 60)], id="hardly anybody waits"),
        pytest.param([(29, 60), (1, 60)], id="one did not answer"),
        pytest.param([(29, 60), (1, SAMPLES_MIN - 1), (31, 60)], id="too few samples"),
        pytest.param([(29, 60), (0, 0), (31, 60)], id="one could not be read"),
    ],
)
def test_nobody_is_named_where_the_samples_do_not_show_it(answers: list[tuple[int, int]]) -> None:
    job = slow_job("act")
    for rank, (waiting, samples) in enumerate(answers):
        job.answer(f"w-{rank}", 40, sampled(rank, waiting, samples))
    assert job.tick(20 + SURVEY_SECONDS + GRACE_SECONDS) == ""
    assert job.told("SlowSteps") == [f"all ranks: it is slow; {NOBODY}"]
    assert job.incidents == {}


def test_slowness_that_ends_during_the_survey_names_nobody() -> None:
    job = slow_job("warn", nodes=2)
    for rank in range(2):
        job.tell(f"w-{rank}", 30, well(rank, 30))
    assert job.told("SlowSteps") == [
        "all ranks: it is slow; it ended before a rank was found to differ"
    ]
    assert job.answer("w-0", 40, sampled(0, 0)) == ""
    assert job.answer("w-1", 40, sampled(1, 30)) == ""
    assert len(job.told("SlowSteps")) == 1


def test_another_fault_ends_the_survey() -> None:
    job = slow_job("warn", nodes=2)
    job.run("""
        30 gone w-1 -> stop w-0 in 0 keep, create w-1, status Faulted 1, event Faulted,
            event SlowSteps, incident 1 open, ledger
    """)
    job.answer("w-0", 31, sampled(0, 0))
    assert job.told("SlowSteps") == [
        "all ranks: it is slow; it ended before a rank was found to differ"
    ]


def test_the_first_alarm_waits_a_moment_for_the_others_before_the_survey() -> None:
    job = WatchedJob(modes="slow=warn")
    job.tell("w-0", 20, well(0, 20))
    assert job.tell("w-1", 20, ill(1, SLOW, 18)) == ""
    assert job.tick(20 + COMPARE_SECONDS) == "sample w-0, sample w-1"


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_equal_ranks_are_not_taken_for_stragglers(world: int) -> None:
    named = 0
    for seed in range(2_000):
        source = random.Random(f"{world} {seed}")
        share = source.uniform(0.0, 0.9)
        ranks = {
            rank: sampled(rank, sum(source.random() < share for _ in range(60)))
            for rank in range(world)
        }
        named += bool(stragglers(ranks, world))
    assert named <= 4, "two in 1,000 surveys at most"


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_a_rank_that_takes_twice_as_long_is_found(world: int) -> None:
    found = 0
    for seed in range(500):
        source = random.Random(f"{world} {seed}")
        slow = source.randrange(world)
        # The collective itself takes a tenth of the straggler's step.
        shares = [0.05 if rank == slow else 0.5 for rank in range(world)]
        ranks = {
            rank: sampled(rank, sum(source.random() < share for _ in range(60)))
            for rank, share in enumerate(shares)
        }
        found += stragglers(ranks, world) == (slow,)
    assert found >= 490
