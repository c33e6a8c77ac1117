"""The choice of ranks that parked workers import for, and the use of these workers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from unbroken.agent.workers.environment import Program
from unbroken.agent.workers.warm import TRIALS_MAX, ParkedRanks, ParkedWorker, rank_of

PROGRAM = Program(0, (), {}, "", b"")


class Pairs:
    """Parked workers, and the ends of their pairs that these would read."""

    def __init__(self, count: int) -> None:
        made = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        self.parked = [ParkedWorker(ours, pid=pid + 1) for pid, (ours, _) in enumerate(made)]
        self.theirs = [theirs for _, theirs in made]
        for each in (*self.theirs, *(one.pair for one in self.parked)):
            each.setblocking(False)

    def order(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.theirs[number].recv(10_000))
        return found

    def answer(self, number: int, **left_out: str) -> None:
        said = {"type": "prepared", "modules": 3, "left_out": left_out}
        self.theirs[number].send(json.dumps(said).encode())


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs(3)
    yield made
    for each in (*made.theirs, *(one.pair for one in made.parked)):
        each.close()


def program(rank: int, **variables: str) -> Program:
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    return replace(PROGRAM, local_rank=rank, environment={"HOME": "/", **given, **variables})


def known(*ranks: int) -> ParkedRanks:
    """Return the ranks of a node whose template leaves modules to parked workers."""
    return ParkedRanks({rank: program(rank) for rank in ranks}, later=3)


def test_one_worker_after_another_imports_for_each_rank(pairs: Pairs) -> None:
    ranks, parked = known(0, 1), pairs.parked
    assert ranks.prepare_next(parked) is parked[0]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    assert pairs.order(0) == {"type": "prepare", "environment": environment, "left_out": {}}
    assert ranks.prepare_next(parked) is None, "it would take another processor"
    assert not ranks.take_answer(parked[0])
    pairs.answer(0)
    assert ranks.take_answer(parked[0])
    assert (parked[0].is_prepared, ranks.imported) == (True, 3)
    assert ranks.prepare_next(parked) is parked[1]
    pairs.answer(1)
    ranks.take_answer(parked[1])
    assert ranks.prepare_next(parked) is None, "each rank has a worker"
    assert ranks.unsuitable(parked) == []


def test_nobody_imports_if_nothing_is_left_to_do_or_nobody_is_free(pairs: Pairs) -> None:
    assert replace(known(0), later=0).prepare_next(pairs.parked) is None
    assert known().prepare_next(pairs.parked) is None
    assert known(0).prepare_next([]) is None
    pairs.parked[0].pid = 0
    assert known(0).prepare_next(pairs.parked[:1]) is None, "it is not known to be there yet"


@pytest.mark.parametrize(
    ("variables", "is_suited"),
    [({}, True), ({"MASTER_PORT": "2", "HOME": "/b", "JOB_RESTART_COUNT": "7"}, True),
     ({"RANK": "5"}, False), ({"WORLD_SIZE": "4"}, False), ({"MASTER_ADDR": "b"}, False)],
)  # fmt: skip
def test_a_prepared_worker_becomes_its_rank_and_no_other(
    variables: dict[str, str], is_suited: bool, pairs: Pairs
) -> None:
    ranks, (own, plain, _) = known(0), pairs.parked
    ranks.prepare_next(pairs.parked)
    newest = program(0, **variables)
    assert not own.suits(newest), "it still imports"
    pairs.answer(0)
    ranks.take_answer(own)
    assert own.suits(newest) is is_suited
    assert plain.suits(newest)
    ranks.programs[0] = newest
    assert ranks.unsuitable(pairs.parked) == ([] if is_suited else [own])


def test_a_worker_that_imports_when_its_rank_starts_is_of_no_use(pairs: Pairs) -> None:
    ranks = known(0)
    ranks.prepare_next(pairs.parked)
    assert ranks.unsuitable(pairs.parked) == pairs.parked[:1]


def test_unfit_modules_are_told_to_the_next_worker_until_trials_end(pairs: Pairs) -> None:
    ranks = known(0)
    for trial in range(TRIALS_MAX):
        assert ranks.may_try()
        (parked,) = made = pairs.parked[:1]
        parked.rank = None
        ranks.prepare_next(made)
        assert len(pairs.order(0)["left_out"]) == trial
        pairs.answer(0, **{f"m{trial}": "has started threads: t"})
        assert ranks.take_answer(parked)
        assert not parked.is_prepared
    pairs.parked[0].rank = None
    assert (ranks.prepare_next(pairs.parked), ranks.may_try()) == (None, False)


def test_after_a_worker_that_ended_while_it_imported_no_other_tries(pairs: Pairs) -> None:
    ranks = known(0, 1)
    ranks.prepare_next(pairs.parked)
    pairs.theirs[0].close()
    assert ranks.take_answer(pairs.parked[0])
    assert ranks.prepare_next(pairs.parked[1:]) is None


def test_a_worker_that_has_ended_is_given_no_rank(pairs: Pairs) -> None:
    pairs.theirs[0].close()
    assert known(0).prepare_next(pairs.parked) is None
    assert pairs.parked[0].rank is None


def test_a_start_imports_what_no_parked_worker_has_imported(pairs: Pairs) -> None:
    read, thread = "RANK is read while it is imported", "has started threads: t"
    native = "polars: has started threads (cleaner) of a library, which a fork would lose"
    template = {"a": read, "b": f"a: {read}", "c": thread, "d": native}
    ranks = known(0)
    assert ranks.left_out(template) == template, "none has imported yet"
    ranks.prepare_next(pairs.parked)
    pairs.answer(0)
    ranks.take_answer(pairs.parked[0])
    ranks.unfit["b"] = thread
    assert ranks.left_out(template) == {"b": thread, "c": thread}


def test_variables_of_an_attempt_belong_to_no_rank() -> None:
    assert rank_of(program(1)) == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
