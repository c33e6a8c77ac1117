"""Agents killed before each line of agreeing, sending, receiving, keeping and fetching.

In each case, all remaining copies are whole, and all ranks have a step in common that they agreed
upon. `make test` takes few of the executed lines, ALL=1 one in thirteen: all take hours.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.agent.replication_nodes import STEPS, Process, begin, fetching, listeners, training
from unbroken.agent.snapshots.replication import VARIABLE

pytestmark = pytest.mark.slow
storm = pytest.param(13, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)])
POINTS_MAX = 30_000


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(10**12))
    monkeypatch.delenv("UNBROKEN_JOB", raising=False)


@contextmanager
def nodes(victim: int, point: int, burst: int) -> Iterator[tuple[list[Process], list[str]]]:
    """Start both nodes; yield them and their addresses."""
    with ExitStack() as stack:
        ends = [stack.enter_context(one) for one in listeners()]
        both = [
            begin(training, rank, ends, point if rank == victim else 0, burst) for rank in (0, 1)
        ]
        yield both, [f"127.0.0.1:{one.getsockname()[1]}" for one in ends]


def steps(points: list[list[int]]) -> set[int]:
    """Return the steps; assert that all are of the killed attempt."""
    assert all(attempt == 0 for attempt, _ in points)
    return {step for _, step in points}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("burst", "stride"), [(1, 331), (3, 1009), *[
    pytest.param(burst, 13, marks=storm.marks) for burst in (1, 3)
]])  # fmt: skip
def test_killed_before_a_line_of_replication(victim: int, burst: int, stride: int) -> None:
    agreed = []
    for point in range(1, POINTS_MAX, stride):
        with nodes(victim, point, burst) as (both, _):
            if both[victim].is_through():
                # The other is too, or the victim is killed while it serves the other.
                select.select([one.sock for one in both], [], [])
            is_through = both[victim].said() != {}
            left: dict[str, Any] = both[1 - victim].said()
        common = steps(left["own"]) & steps(left["others"])
        agreed.append(left["common"])
        assert left["common"] == -1 or max(common, default=-1) >= left["common"], (point, left)
        if is_through:
            break
    assert agreed[0] == -1
    assert is_through, "every line was reached"
    assert max(agreed) > 0


@pytest.mark.parametrize("stride", [97, storm])
def test_killed_before_a_line_of_a_fetch(stride: int) -> None:
    """Check that the holder of a copy still has it for the next fetch."""
    with nodes(-1, 0, 1) as (both, addresses):
        assert [one.is_through() for one in both] == [True, True]
        both[0].said()
        for point in range(1, POINTS_MAX, stride):
            found = begin(fetching, addresses[1:], point).said()
            if found:
                break
            assert steps(begin(fetching, addresses[1:], 0).said()["own"])
        assert STEPS - 1 in steps(found["own"])
        assert point > 100, "every line was reached"
        both[1].said()
