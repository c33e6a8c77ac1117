"""Repeated and skipped samples in a report, compared with a count of every sample."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.job.record.receipts import (
    SAMPLES_MAX,
    Accounted,
    Track,
    Tracks,
    account,
    observe,
)
from unbroken.wire.observation import RankWatch


@dataclass(frozen=True)
class Rank:
    """One rank's data around a fault, sample by sample."""

    batch: int
    behind: int
    """Steps by which its last report is older than the newest step of the job."""
    resumes_at: int | None
    """Step at which its data resumes after the fault; None: at that of the state."""


RANKS = st.builds(
    Rank,
    batch=st.integers(1, 64),
    behind=st.integers(0, 3),
    resumes_at=st.none() | st.integers(0, 3000),
)


def track(*seen: tuple[int, float]) -> Track:
    """Return a rank's track from reports."""
    tracks: Tracks = {}
    for step, samples in seen:
        observe(tracks, [RankWatch(0, step=step, metrics={"samples": samples})])
    return tracks[0]


@given(
    st.lists(RANKS, min_size=1, max_size=4),
    st.integers(5, 40),
    st.integers(0, 40),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_each_sample_is_counted_once(
    ranks: list[Rank], newest: int, lost: int, reports: list[int]
) -> None:
    lost = min(lost, newest + 1)
    restored = newest - lost
    before, after = {}, {}
    repeated = skipped = 0
    for number, one in enumerate(ranks):
        given_before = set(range((newest + 1) * one.batch))
        trained = set(range((restored + 1) * one.batch))
        begin = len(trained) if one.resumes_at is None else one.resumes_at
        steps = [restored + at for at in (min(reports), sum(reports))]
        after[number] = track(*((at, begin + (at - restored) * one.batch) for at in steps))
        told = newest - one.behind
        before[number] = track((0, one.batch), (told, (told + 1) * one.batch))
        again = set(range(begin, begin + 5000)) & given_before
        never = set(range(begin)) - trained
        repeated += len(again)
        skipped += len(never)
    assert account(before, after, lost) == Accounted(repeated, skipped, is_exact=True)


def test_the_batch_is_taken_from_the_attempt_after_where_one_step_was_seen_before() -> None:
    before = {0: track((7, 64))}
    assert account(before, {0: track((7, 64))}, 1) is None
    assert account(before, {0: track((7, 64), (9, 80))}, 1) == Accounted(8, 0, is_exact=True)


def test_batches_that_vary_are_said_to_and_make_no_gap() -> None:
    before = {0: track((0, 8), (9, 77))}
    found = account(before, {0: track((9, 77), (12, 104))}, 2)
    assert found == Accounted(15, 0, is_exact=False)
    assert str(found) == "about 15 samples repeated"
    assert account(before, {0: track((8, 72))}, 2) == found


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ({}, {}, 1),
        ({0: track((0, 8), (1, 16))}, {}, 1),
        ({0: track((0, 8), (1, 16))}, {0: track((1, 16)), 1: track((1, 16))}, 1),
        ({0: track((0, 8), (1, 16))}, {0: track((1, 16))}, None),
    ],
)
def test_what_is_not_told_is_not_known(before: Tracks, after: Tracks, steps: int | None) -> None:
    assert account(before, after, steps) is None


@pytest.mark.parametrize("samples", [float("nan"), float("inf"), -1.0, 2.0 * SAMPLES_MAX])
def test_what_is_no_count_is_not_taken(samples: float) -> None:
    tracks: Tracks = {}
    observe(tracks, [RankWatch(0, step=1, metrics={"samples": samples})])
    observe(tracks, [RankWatch(0, metrics={"samples": 8.0}), RankWatch(0, step=1)])
    assert tracks == {}


def test_a_rank_that_begins_anew_is_seen_anew() -> None:
    assert track((0, 8), (5, 48), (2, 24), (3, 32)) == track((2, 24), (3, 32))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Accounted(0, 0, is_exact=True), "no sample repeated or skipped"),
        (Accounted(1, 0, is_exact=True), "1 sample repeated"),
        (Accounted(0, 16, is_exact=True), "16 samples skipped"),
        (Accounted(2, 3, is_exact=False), "about 2 samples repeated and about 3 samples skipped"),
    ],
)
def test_it_is_said_in_words(found: Accounted, said: str) -> None:
    assert str(found) == said
