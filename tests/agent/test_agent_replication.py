"""Snapshots at the buddy: between real agents, with workers that really save."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.running import Operator, Running, linked, program, running, start, stop
from agent.snapshot_clients import TRAINS, Copy, copies, until
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow


@asynccontextmanager
async def pair(directory: Path, text: str, **environ: str) -> AsyncIterator[tuple[Running, ...]]:
    """Two agents of two workers each."""
    async with AsyncExitStack() as stack:
        agents = []
        for number in range(2):
            own = directory / str(number)
            own.mkdir()
            agents.append(stack.enter_context(running(own, program(own, text), **environ)))
        yield tuple(agents)


def address(agent: Running) -> str:
    """As the operator names it."""
    return f"127.0.0.1:{agent.port}"


def begin(attempt: int, rank: int, **changes: Any) -> Any:
    """Start one of two nodes."""
    return start(attempt, rank=rank, nnodes=2, **changes)


def told(agent: Running, attempt: int, local_rank: int, line: int = 0) -> dict[str, Any]:
    """A line that a worker has written."""
    text = agent.attempt_file(attempt, local_rank, "stdout.log").read_text()
    found: dict[str, Any] = json.loads(text.splitlines()[line])
    return found


async def ready(operator: Operator) -> None:
    await operator.state(AgentState.READY)


def test_the_newest_of_all_ranks_reach_the_buddy_and_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            pair(tmp_path, TRAINS, FIRST="5", LAST="8", SECONDS="0.4") as (first, second),
            linked(first) as operator,
            linked(second) as other,
        ):
            operator.send(begin(0, 0, buddy=address(second)))
            for rank in (0, 1):
                await until(lambda r=rank: Copy(0, 7) in copies(second, r))
                assert len(copies(second, rank)) <= 2
            # The node is lost; another takes its rank and asks for what it had.
            first.process.kill()
            other.send(stop(0))
            await ready(other)
            other.send(begin(1, 0, holders=(address(first), address(second))))
            await other.workers(1)
            for rank in (0, 1):
                fetched = told(second, 1, rank)["fetched"]
                assert {"attempt": 0, "step": 7} in fetched["steps"]
                assert all(fetched["whole"])
                assert set(fetched["from"]) == {None}

    asyncio.run(scenario())
