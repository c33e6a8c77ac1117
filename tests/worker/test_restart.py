"""In-process restart: real ranks, really killed, over gloo; the others keep their process."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.watching import PATIENCE_SECONDS
from tests.worker.gangs import Gang, gang, templates
from unbroken.errors import SpecError
from unbroken.wire.ipc import AT_BARRIER, INIT, JOB_START, PAST_BARRIER
from unbroken.wire.ipc import STUCK_CODE as TOLD_CODE
from unbroken.worker.restart.restartable import STUCK_CODE, restartable

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
HEAVY = [pytest.mark.heavy, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def asked() -> Iterator[IO[str]]:
    with templates() as found:
        yield found


@pytest.fixture
def three(asked: IO[str], tmp_path: Path) -> Iterator[Gang]:
    with gang(asked, tmp_path, 3) as made:
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
    ended = three.arrive(0, 1)
    for _ in range(20):
        # Nobody takes the place of rank 2: the others wait in their stores and groups.
        three.resume([rank for rank in (0, 1) if rank not in ended], ended)
        if ended:
            three.until("begins", *ended)
        three.fault(0, 1)
        ended = three.arrive(0, 1)
    three.resume([rank for rank in (0, 1) if rank not in ended], [2, *ended])
    three.until("runs")


def test_neighbours_notice_before_the_agent_says_so(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(2)
    # Gloo's word reaches them within milliseconds; the agent's comes when it comes.
    threading.Event().wait(0.3)
    goes_on(three, 2)


def test_a_fault_at_the_barrier_begins_again(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(2)
    three.fault(0, 1)
    # Rank 0 has the store: where gloo holds one of its groups, it ends.
    ended = three.arrive(0, 1)
    assert 1 not in ended
    for _ in range(50):
        three.fault(1)
        assert not three.arrive(1)
    three.kill(*{0} - {*ended})
    goes_on(three, 0, 2)


def test_its_agent_knows_with_what_a_worker_ends_that_cannot_leave() -> None:
    assert STUCK_CODE == TOLD_CODE == os.EX_TEMPFAIL


def test_ones_own_mistake_is_raised_at_once(three: Gang) -> None:
    three.start(action="fail")
    (raised,) = three.until("raises", 2)
    assert raised["error"] == "ValueError: a mistake of the script"
    goes_on(three, 2)


@pytest.mark.heavy
def test_models_may_go_with_the_function_that_made_them(three: Gang) -> None:
    # Torch's own destructor of a model's reducer waits for the group's threads with the GIL.
    three.start(action="models")
    held = [one["held"] for one in three.until("models")]
    three.until("returns")
    assert max(held) <= 2, "groups that were destroyed are not let go of"


def test_what_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(SpecError, match="the function that trains, not 3"):
        restartable(3)  # type: ignore[arg-type]


def test_who_returns_restarts_no_more(three: Gang) -> None:
    three.start(action=["return", "reduce", "reduce"])
    three.until("returns", 0)
    inits = three.socket.told(0, INIT)
    said = [inits.get()["restartable"] for _ in range(3)]
    assert said == [False, True, False]
    # Its process ends now, and has been at no barrier before.
    assert "ended" in three.socket.told(0, AT_BARRIER).get(timeout=PATIENCE_SECONDS)


def test_the_agent_hears_when_the_barrier_is_passed(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.kill(0)
    goes_on(three, 0)
    said = three.socket.told(1, PAST_BARRIER).get(timeout=PATIENCE_SECONDS)
    assert (said["local_rank"], said["attempt"]) == (1, 1)
    assert three.socket.told(0, PAST_BARRIER).empty()


def test_who_is_at_the_barrier_ends_with_the_agent(three: Gang) -> None:
    three.start()
    three.until("runs")
    three.fault(0, 1, 2)
    # Where gloo holds one of its groups, a rank ends.
    waiting = {0, 1, 2} - {*three.arrive(0, 1, 2)}
    assert waiting
    three.socket.close()
    assert {"the agent ended" in one["error"] for one in three.until("raises", *waiting)} == {True}


def test_a_late_start_of_an_older_attempt_is_no_start(three: Gang) -> None:
    three.start()
    three.until("runs")
    # Nobody is at the barrier: what this says is not for them.
    three.socket.say(0, JOB_START, worker_envs={"MASTER_PORT": "1", "JOB_RESTART_COUNT": "9"})
    three.kill(2)
    goes_on(three, 2)


@pytest.mark.parametrize("restarts", [10, pytest.param(200, marks=HEAVY)])
def test_ranks_are_killed_at_random_moments(three: Gang, restarts: int) -> None:
    chance = random.Random(5)
    three.start()
    for _ in range(restarts):
        # Registered, and then anywhere: in stores, groups, collectives and between.
        three.until(chance.choice(["begins", "runs"]))
        threading.Event().wait(chance.random() * 0.05)
        lost = chance.sample(range(3), chance.choice([1, 1, 1, 2]))
        three.kill(*lost)
        three.recover(*lost)
    three.until("runs")
