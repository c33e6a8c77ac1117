"""Snapshots at the buddy, between real agents with workers that really save."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Operator, Running, linked, program, running, start, stop
from tests.agent.snapshot_clients import NAME, SAVES, TRAINS, Copy, copies, path, slot, until
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow


@asynccontextmanager
async def pair(directory: Path, text: str, **environ: str) -> AsyncIterator[tuple[Running, ...]]:
    """Start two agents of two workers each."""
    async with AsyncExitStack() as stack:
        agents = []
        for number in range(2):
            own = directory / str(number)
            own.mkdir()
            agents.append(stack.enter_context(running(own, program(own, text), **environ)))
        yield tuple(agents)


def address(agent: Running) -> str:
    """Return the address of an agent, as the operator writes it."""
    return f"127.0.0.1:{agent.port}"


def begin(attempt: int, rank: int, **changes: Any) -> Any:
    """Return the start of one of two nodes."""
    return start(attempt, rank=rank, nnodes=2, **changes)


def told(agent: Running, attempt: int, local_rank: int, line: int = 0) -> dict[str, Any]:
    """Return a line that a worker has written."""
    text = agent.attempt_file(attempt, local_rank, "stdout.log").read_text()
    found: dict[str, Any] = json.loads(text.splitlines()[line])
    return found


async def ready(operator: Operator) -> None:
    await operator.state(AgentState.READY)


async def test_a_step_of_all_ranks_reaches_the_buddy_and_is_there_when_the_node_is_lost(
    tmp_path: Path,
) -> None:
    environ = {"FIRST": "0", "LAST": "100000", "SECONDS": "0.05"}
    async with (
        pair(tmp_path, TRAINS, **environ) as (first, second),
        linked(first) as operator,
        linked(second) as other,
    ):
        operator.send(begin(0, 0, buddy=address(second)))
        other.send(begin(0, 1, buddy=address(first)))
        await until(lambda: has_agreed(first, (0, 1), second, 1))
        await until(lambda: tells_copies(first))
        found = first.report().snapshots
        assert found is not None
        assert (found.buddy, [rank.rank for rank in found.ranks]) == (address(second), [0, 1])
        assert found.memory_bytes > sum(rank.state_bytes for rank in found.ranks) > 0
        assert found.bytes_per_second
        os.kill(first.report().pid or 0, signal.SIGKILL)
        first.wait()
        # Another node takes its rank, and has what it has kept as its buddy.
        other.send(stop(0))
        await ready(other)
        other.send(begin(1, 0, holders=(address(first),)))
        await other.workers(1)
        fetched = [told(second, 1, rank)["fetched"] for rank in (0, 1)]
        points = [{Copy(**one) for one in found["steps"]} for found in fetched]
        assert any(one.step for one in points[0] & points[1])
        for found in fetched:
            assert all(found["whole"])
            assert set(found["from"]) == {None}


def tells_copies(agent: Running) -> bool:
    """Return whether the agent reports a step at its buddy, and one of all nodes, for each rank."""
    found = agent.report().snapshots
    ranks = () if found is None else found.ranks
    return bool(ranks) and all(one.buddy_step and one.common_step is not None for one in ranks)


def common(buddy: Running) -> set[Copy]:
    """Return the copies of both ranks of the first node at the buddy."""
    return set(copies(buddy, 0)) & set(copies(buddy, 1))


KINDS = ("sender", "buddy", "worker")

FETCHES = (
    SAVES
    + """
rank = Saver()
tell(listed=rank.fetch(list=True), first=rank.fetch(from_attempt=0, step=5),
     all=rank.fetch())
signal.pause()
"""
)


async def test_a_new_node_brings_what_its_buddy_has_past_dead_and_silent_holders(
    tmp_path: Path,
) -> None:
    async def scenario(silent: socket.socket) -> None:
        async with (
            pair(tmp_path, FETCHES) as (lost, buddy),
            linked(lost) as operator,
            linked(buddy) as other,
        ):
            other.send(begin(0, 0))
            await other.workers(0)
            for rank in (2, 3):
                for step in (4, 5, 6):
                    code, _, _ = buddy.request("PUT", path(rank, 0, step), slot(rank, 0, step))
                    assert code == 200
            port = silent.getsockname()[1]
            holders = ("127.0.0.1:1", f"127.0.0.1:{port}", address(buddy))
            operator.send(begin(1, 1, holders=holders))
            await operator.workers(1)
            for local_rank in (0, 1):
                found = told(lost, 1, local_rank)
                steps = [{"attempt": 0, "step": 6}, {"attempt": 0, "step": 5}]
                assert found["listed"]["steps"] == steps
                assert "whole" not in found["listed"], "nothing was brought"
                assert len(found["listed"]["problems"]) == 2
                assert found["first"]["steps"] == steps[1:]
                assert found["all"]["steps"] == steps[::-1]
                assert found["all"]["whole"] == [True, True]
                assert found["all"]["from"] == found["listed"]["from"] == [0, 0]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        await scenario(silent)


async def test_at_a_low_rate_both_ranks_of_a_step_arrive_again_and_again(tmp_path: Path) -> None:
    rate, size = 20_000_000, 2_000_000
    environ = {"BYTES": str(size), "FIRST": "0", "LAST": "100000", "SECONDS": "0.02"}
    environ["UNBROKEN_REPLICATE_BYTES_PER_SECOND"] = str(rate)
    async with (
        pair(tmp_path, TRAINS, **environ) as (first, second),
        linked(first) as operator,
        linked(second) as other,
    ):
        seen: set[Copy] = set()

        def has_three() -> bool:
            seen.update(common(second))
            return len(seen) >= 4

        other.send(begin(0, 1, buddy=address(first)))
        operator.send(begin(0, 0, buddy=address(second)))
        await until(has_three)
        summary = json.loads(first.request("GET", "/v1/snapshots")[1])
        assert summary["reason"] == ""


async def test_nothing_is_sent_at_a_rate_of_nothing(tmp_path: Path) -> None:
    environ = {"FIRST": "0", "LAST": "4", "UNBROKEN_REPLICATE_BYTES_PER_SECOND": "0"}
    async with pair(tmp_path, TRAINS, **environ) as (first, second), linked(first) as operator:
        operator.send(begin(0, 0, buddy=address(second)))
        await operator.workers(0)
        await until(lambda: "last" in first.attempt_file(0, 0, "stdout.log").read_text())
        assert copies(second, 0) == []


def has_agreed(agent: Running, ranks: tuple[int, int], buddy: Running, first_step: int = 0) -> bool:
    """Return whether the agent knows of a step, from this one on, that all nodes hold of all ranks.

    Once it does, such a step exists all the time. Before, ranks that do not synchronize may pass
    one another's steps. A node then agrees on the steps of one rank while the other has not saved
    at all.
    """
    step = json.loads(agent.request("GET", "/v1/snapshots")[1])["common"].get(NAME)
    is_late_enough = step is not None and step >= first_step
    return is_late_enough and all(Copy(0, step) in copies(buddy, rank) for rank in ranks)


def at_one_moment(agent: Running, ranks: tuple[int, int]) -> list[set[Copy]]:
    """Return an agent's copies of these ranks at one moment.

    A living sender may continue meanwhile, so copies are listed until two lists are equal.
    """
    before: list[set[Copy]] = []
    while (found := [set(copies(agent, rank)) for rank in ranks]) != before:
        before = found
    return found


@pytest.mark.parametrize(("victim", "seed"), [(v, s) for v in KINDS for s in (1, 2)])
async def test_whoever_is_killed_whenever_only_whole_steps_are_left(
    victim: str, seed: int, tmp_path: Path
) -> None:
    environ = {"BYTES": "5000000", "FIRST": "0", "LAST": "100000", "SECONDS": "0.03"}
    drawn = random.Random(f"{victim} {seed}")
    async with (
        pair(tmp_path, TRAINS, **environ) as (first, second),
        linked(first) as operator,
        linked(second) as other,
    ):
        operator.send(begin(0, 0, buddy=address(second)))
        other.send(begin(0, 1, buddy=address(first)))
        await until(lambda: has_agreed(first, (0, 1), second))
        await until(lambda: has_agreed(second, (2, 3), first))
        # Any moment of the transfers, which continue all the time.
        await asyncio.sleep(drawn.random())
        if victim == "worker":
            report = await operator.state(AgentState.RUNNING)
            os.kill(report.workers[0].pid, signal.SIGKILL)
            await operator.state(AgentState.FAULTED)
        else:
            agent = second if victim == "buddy" else first
            os.kill(agent.report().pid or 0, signal.SIGKILL)
            agent.wait()
        # The helper fails where one is not whole.
        left = {"sender": (second, (0, 1)), "buddy": (first, (2, 3))}
        agent, ranks = left.get(victim, (second, (0, 1)))
        kept = at_one_moment(agent, ranks)
        assert kept[0] & kept[1], "no step of all ranks of the node"
        if victim == "buddy":
            report = await operator.state(AgentState.RUNNING, 0)
            assert report.faults == (), "training does not feel it"


RECEIPTS = (
    SAVES
    + """
rank = Saver()
good = dict(step=7, source="memory", seconds=0.5, checksum="00ff", saved_attempt=0, replicas="0-1")
if ATTEMPT == 0:
    for bad in ({"step": -1}, {"step": "7"}, {"source": ""}, {"source": "x" * 300},
                {"seconds": True}, {"seconds": float("nan")}, {"checksum": 1}, {"rank": 9},
                {"attempt": 3}, {"replicas": None}):
        wrong = {**good, "step": 5, **bad}  # a text that is too long is cut and kept for a moment
        rank.say("receipt", **{"name": NAME, "rank": RANK, "attempt": ATTEMPT, **wrong})
    rank.say("receipt", name=NAME, rank=RANK, attempt=ATTEMPT, **{**good, "step": 6})
    rank.say("receipt", name=NAME, rank=RANK, attempt=ATTEMPT, **good)
tell(up=True)
signal.pause()
"""
)


async def test_receipts_are_reported_until_the_next_attempt(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, RECEIPTS)) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            report = await operator.report(
                lambda found: [one.step for one in found.receipts] == [7, 7]
            )
            assert [one.rank for one in report.receipts] == [0, 1]
            one = report.receipts[0]
            assert (one.source, one.seconds, one.checksum) == ("memory", 0.5, "00ff")
            assert (one.saved_attempt, one.name, one.replicas) == (0, NAME, "0-1")
            operator.send(stop(0))
            await ready(operator)
            operator.send(start(1))
            assert (await operator.workers(1)).receipts == ()
