"""A real agent keeps what a stopped worker has saved, for the next attempt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agent.ipc_clients import RAW
from agent.running import SLEEPER, Running, linked, program, running, start, stop
from agent.snapshot_clients import until
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


def copied(agent: Running) -> list[int]:
    """Steps of rank 0 that an agent keeps for another."""
    code, body, _ = agent.request("GET", "/v1/snapshots/training/0")
    assert code == 200, body
    return [one["step"] for one in json.loads(body)["snapshots"]]


def test_a_lost_node_goes_on_from_the_memory_of_its_buddy(tmp_path: Path) -> None:
    """The third agent takes the rank of the first, whose memory is gone; the second has copies."""

    async def scenario(lost: Running, buddy: Running, new: Running) -> int:
        places = [f"127.0.0.1:{one.port}" for one in (lost, buddy, new)]
        async with linked(lost) as first, linked(buddy) as second, linked(new) as third:
            second.send(start(0, rank=1, nnodes=2))
            await second.workers(0)
            first.send(start(0, nnodes=2, buddy=places[1]))
            await first.workers(0)
            await until(lambda: bool(copied(buddy)))
            lost.process.kill()
            third.send(start(1, nnodes=2, holders=(places[1],)))
            await third.workers(1)
            return max(copied(buddy))

    folders = [tmp_path / name for name in ("lost", "buddy", "new")]
    for folder, text in zip(folders, (TRAIN, SLEEPER, TRAIN), strict=True):
        folder.mkdir()
        program(folder, text)
    with (
        running(folders[0], str(folders[0] / "train.py"), nproc=1) as lost,
        running(folders[1], str(folders[1] / "train.py"), nproc=1) as buddy,
        running(folders[2], str(folders[2] / "train.py"), nproc=1) as new,
    ):
        newest = asyncio.run(scenario(lost, buddy, new))
        told = json.loads(new.attempt_file(1, 0, "stdout.log").read_text())
    assert told == [newest, "buddy 1", 0, [newest]]


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
