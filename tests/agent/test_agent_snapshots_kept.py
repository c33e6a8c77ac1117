"""A real agent keeps what a stopped worker has saved, for the next attempt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agent.ipc_clients import RAW
from agent.running import linked, program, running, start, stop
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, signal, torch
from unbroken.worker.snapshot import Snapshot
weights = torch.zeros(1000)
snapshot = Snapshot(weights=weights, rng=True)
found = snapshot.restore()
told = found and [found.step, found.source, found.attempt, weights.unique().tolist()]
first = found.step + 1 if found else 0
for step in range(first, first + 3):
    weights.fill_(step)
    assert snapshot.save(step)
os.write(1, (json.dumps(told) + "\\n").encode())
signal.pause()
"""


def test_a_killed_worker_goes_on_from_the_memory_of_its_agent(tmp_path: Path) -> None:
    async def scenario(port: int) -> list[str]:
        lines = []
        async with linked(agent) as operator:
            for attempt in (0, 1):
                await operator.state(AgentState.READY)
                operator.send(start(attempt))
                await operator.workers(attempt)
                lines.append(agent.attempt_file(attempt, 0, "stdout.log").read_text())
                operator.send(stop(attempt))
        return lines

    with running(tmp_path, program(tmp_path, TRAIN), nproc=1) as agent:
        lines = asyncio.run(scenario(agent.port))
    assert [json.loads(line) for line in lines] == [None, [2, "memory", 0, [2.0]]]


ASKS = (
    RAW
    + """
client = Client()
client.say("init")
rank, attempt = int(os.environ["RANK"]), int(os.environ["JOB_RESTART_COUNT"])
def ask(kind, **keys):
    client.say(kind, name="state", **keys)
    (length,) = struct.unpack(">I", client.take(4))
    return json.loads(client.take(length)).get("error", "")
tell(
    own=ask("snapshot_open", rank=rank, attempt=attempt, slot=0, bytes=8192),
    others=ask("snapshot_open", rank=rank + 1, attempt=attempt, slot=0, bytes=8192),
    newer=ask("snapshot_open", rank=rank, attempt=attempt + 1, slot=0, bytes=8192),
    look=ask("snapshot_find", rank=rank + 1, attempt=attempt),
)
signal.pause()
"""
)


def test_a_worker_opens_only_its_own_memory_in_the_attempt_that_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(agent) as operator:
            operator.send(start(3))
            await operator.workers(3)

    with running(tmp_path, program(tmp_path, ASKS), nproc=1) as agent:
        asyncio.run(scenario())
        told = json.loads(agent.attempt_file(3, 0, "stdout.log").read_text())
    assert (told["own"], told["look"]) == ("", "")
    assert told["others"] == "this is rank 0, not 1"
    assert told["newer"] == "attempt 3 runs, not 4"
