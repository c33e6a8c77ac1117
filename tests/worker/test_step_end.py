"""The end of a step before a planned move: all ranks leave with the same step saved."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.worker.gangs import Gang, gang, templates
from unbroken.worker.restart import step_end
from unbroken.worker.restart.step_end import LEAST_SECONDS, wait_seconds
from unbroken.worker.snapshot.snapshot import Snapshot

MOVES = 25
SAVE_SECONDS = 2.0


@pytest.fixture(scope="module")
def asked() -> Iterator[IO[str]]:
    pytest.importorskip("torch")
    with templates() as found:
        yield found


def newest(ranks: Gang, attempt: int) -> dict[int, int]:
    """The newest step that each rank has saved in an attempt."""
    return {
        one["rank"]: one["step"]
        for one in ranks.seen
        if (one["what"], one["attempt"]) == ("saved", attempt)
    }


def order(ranks: Gang, chance: random.Random) -> None:
    """Send each rank the order to leave, one after the other, at any time."""
    for rank in chance.sample(range(ranks.size), ranks.size):
        threading.Event().wait(chance.choice([0.0, 0.001, 0.01, 0.1]) * chance.random())
        ranks.fault(rank, save_seconds=SAVE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_whenever_the_order_comes_all_have_saved_the_same_step(
    asked: IO[str], tmp_path: Path, size: int
) -> None:
    chance = random.Random(size)
    with gang(asked, tmp_path, size) as ranks:
        ranks.start(action="save")
        for attempt in range(MOVES):
            for _ in range(3):
                ranks.until("saved")
            order(ranks, chance)
            ended = ranks.arrive(*range(size))
            kept = [rank for rank in range(size) if rank not in ended]
            ranks.resume(kept, ended)
            ranks.until("runs")
            assert len(set(newest(ranks, attempt).values())) == 1, f"attempt {attempt}"


@pytest.mark.slow
def test_a_rank_that_saves_nothing_leaves_at_once(asked: IO[str], tmp_path: Path) -> None:
    with gang(asked, tmp_path, 2) as ranks:
        ranks.start(action="sleep")
        ranks.until("runs")
        ranks.fault(0, 1, save_seconds=1e6)
        assert not ranks.arrive(0, 1)


@pytest.mark.slow
def test_a_rank_that_saves_no_more_is_made_to_leave(asked: IO[str], tmp_path: Path) -> None:
    with gang(asked, tmp_path, 2) as ranks:
        ranks.start(action="save_once")
        ranks.until("saved")
        ranks.fault(0, 1, save_seconds=0.5)
        assert not ranks.arrive(0, 1)


def test_a_rank_leaves_before_the_forward_pass_that_follows_a_snapshot() -> None:
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Linear(2, 2), torch.ones(1, 2)
    left: list[str] = []
    snapshot = Snapshot(model=model, name="end of a step")
    try:
        snapshot.save(1)
        step_end.request(lambda: left.append("once"))
        model(batch)
        assert not left, "this step is not saved yet"
        snapshot.save(2)
        assert not left, "the script may have something to do at the end of a step"
        model(batch)
        assert left == ["once"]
        step_end.reset()
        model(batch)
        snapshot.save(3)
        model(batch)
        assert left == ["once"]
    finally:
        step_end.reset()
        snapshot.close()


@pytest.mark.parametrize(
    ("saves", "seconds"),
    [
        ([], 0.0),  # nothing to lose that another rank has
        ([9.9], SAVE_SECONDS),  # how long a step takes is not known
        ([9.0, 9.5], 0.5),
        ([9.0, 9.99, 10.0], 1.98),
        ([9.0, 9.01], LEAST_SECONDS),  # it should have ended long ago
        ([9.99, 10.0], LEAST_SECONDS),  # a busy machine may hold it up
        ([1.0, 9.0], SAVE_SECONDS + 5.0),
        ([4.0, 9.0], 0.0),  # the step lasts for 4 s more
        ([4.0, 7.0], SAVE_SECONDS),
    ],
)
def test_a_step_has_twice_its_usual_time_within_the_limit(
    saves: list[float], seconds: float
) -> None:
    limit = max(SAVE_SECONDS, seconds)
    assert wait_seconds(saves, 10.0, limit) == pytest.approx(seconds)
