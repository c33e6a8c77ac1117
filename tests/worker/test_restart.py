"""In-process restart: real ranks, really killed, over gloo; the others keep their process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from gangs import Gang, gang

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def three() -> Iterator[Gang]:
    with gang(3) as made:
        yield made


def goes_on(ranks: Gang, *lost: int) -> None:
    """A new attempt in which everybody is who they were."""
    before = list(ranks.pids)
    kept = ranks.recover(*lost)
    assert {one["rank"]: one["pid"] for one in ranks.until("runs")} == dict(enumerate(ranks.pids))
    assert kept == [rank for rank in range(ranks.size) if ranks.pids[rank] == before[rank]]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_survivors_of_a_collective_keep_their_process(three: Gang, lost: int) -> None:
    three.start()
    three.until("runs")
    for _ in range(3):
        three.kill(lost)
        goes_on(three, lost)


DOINGS = ["compute", "sleep", "queue", "lock", "finalize", "swallow", "ddp"]


@pytest.mark.parametrize("action", DOINGS)
def test_whatever_they_do_they_leave(three: Gang, action: str) -> None:
    three.start(action=action)
    three.until("runs")
    for _ in range(2):
        three.kill(1)
        goes_on(three, 1)


def test_two_of_three_are_lost(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(0, 2)
    goes_on(three, 0, 2)


def test_who_waits_for_the_store_leaves(three: Gang) -> None:
    three.start(1, 2)
    three.until("begins", 1, 2)
    three.recover(0)
    three.until("runs")


def test_who_waits_for_the_others_leaves(three: Gang) -> None:
    three.start(0, 1)
    three.until("begins", 0, 1)
    three.recover(2)
    three.until("runs")


def test_who_makes_a_second_group_leaves(three: Gang) -> None:
    three.start(action="group")
    three.until("runs")
    three.kill(1)
    goes_on(three, 1)


def test_a_fault_right_after_the_start_begins_again(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(2)
    three.fault(0, 1)
    three.arrive(0, 1)
    for _ in range(20):
        # Nobody takes the place of rank 2: the others wait in their stores and groups.
        three.resume([0, 1], [])
        three.fault(0, 1)
        three.arrive(0, 1)
    three.resume([0, 1], [2])
    three.until("runs")


def test_neighbours_notice_before_the_agent_says_so(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(2)
    # Gloo's word reaches them within milliseconds; the agent's comes when it comes.
    threading.Event().wait(0.3)
    goes_on(three, 2)
