"""Snapshots of a stopped worker, which a real agent keeps for the next attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.ipc_clients import RAW
from tests.agent.running import SLEEPER, Running, linked, program, running, start, stop
from tests.agent.snapshot_clients import SAVES, path, slot, until
from unbroken.agent.ports import OfferedPorts
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow
ports = OfferedPorts()


@pytest.fixture(scope="module", autouse=True)
def _leave_ports() -> Iterator[None]:
    yield
    ports.close()


TRAIN = """
import json, os, signal, torch
from unbroken.worker.snapshot.snapshot import Snapshot
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


async def test_a_killed_worker_goes_on_from_the_memory_of_its_agent(tmp_path: Path) -> None:
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
        lines = await scenario(agent.port)
    assert [json.loads(line) for line in lines] == [None, [2, "memory", 0, [2.0]]]


def copied(agent: Running) -> list[int]:
    """Return the steps of rank 0 that an agent keeps for another."""
    code, body, _ = agent.request("GET", "/v1/snapshots/training/0")
    assert code == 200, body
    return [one["step"] for one in json.loads(body)["snapshots"]]


@pytest.mark.heavy
async def test_a_lost_node_goes_on_from_the_memory_of_its_buddy(tmp_path: Path) -> None:
    """Give the rank of the first agent, whose memory is lost, to a third; the second has copies."""

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
        newest = await scenario(lost, buddy, new)
        told = json.loads(new.attempt_file(1, 0, "stdout.log").read_text())
    assert told == [newest, "buddy 1", 0, [newest]]


DIVIDED = """
import json, os, signal, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from unbroken.worker.snapshot.snapshot import Snapshot
dist.init_process_group("gloo")
torch.manual_seed(3)
model = fully_shard(torch.nn.Linear(5, 7), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.Adam(model.parameters())
snapshot = Snapshot(model=model, optimizer=optimizer)
found = snapshot.restore()
def weights():
    return [one.full_tensor().tolist() for one in model.parameters()]
told = [found and [found.step, found.source], weights()]
for step in range(3 if found is None else 0):
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    snapshot.save(step)
snapshot.flush()
os.write(1, (json.dumps([*told, weights()]) + "\\n").encode())
signal.pause()
"""


@pytest.mark.heavy
async def test_who_is_left_divides_what_it_has_of_all_ranks(tmp_path: Path) -> None:
    """Lose one of two nodes, so that the job continues with the other alone."""

    async def scenario(lost: Running, left: Running) -> None:
        places = [f"127.0.0.1:{one.port}" for one in (lost, left)]
        port = ports.next(None)
        async with linked(lost) as first, linked(left) as second:
            both = {"nnodes": 2, "master_port": port}
            first.send(start(0, **both, buddy=places[1]))
            second.send(start(0, rank=1, **both, buddy=places[0]))
            await second.workers(0)
            await until(lambda: 2 in copied(left))
            lost.process.kill()
            second.send(stop(0))
            await second.state(AgentState.READY)
            second.send(start(1, master_port=ports.next(None)))
            await second.workers(1)

    folders = [tmp_path / name for name in ("lost", "left")]
    for folder in folders:
        folder.mkdir()
        program(folder, DIVIDED)
    with (
        running(folders[0], str(folders[0] / "train.py"), nproc=1) as lost,
        running(folders[1], str(folders[1] / "train.py"), nproc=1) as left,
    ):
        await scenario(lost, left)
        texts = [left.attempt_file(one, 0, "stdout.log").read_text() for one in (0, 1)]
    first, second = (json.loads(text) for text in texts)
    assert second[0] == [2, "memory of 2 ranks, divided anew"]
    assert (first[0], second[1]) == (None, first[2])


LOOKS = (
    SAVES
    + """
rank = Saver()
if ATTEMPT == 0:
    for step in (4, 5):
        rank.save(step, step % 2)
    tell(saved=RANK)
else:
    listed, fds = rank.ask("snapshot_find", everyone=True)
    found = []
    for one in listed["steps"]:
        answer, own = rank.ask("snapshot_find", rank=one["rank"], from_attempt=one["attempt"],
                               step=one["step"])
        (fd,) = own
        with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
            header = read(memory[:1024], len(memory))
            body = memory[BODY_AT : BODY_AT + header.body_bytes]
            is_whole = body == pattern(header.rank, header.step, header.body_bytes)
        found.append([one["world_size"], one["rank"], header.step, is_whole])
    other = rank.ask("snapshot_find", rank=2, from_attempt=0, step=9)
    tell(found=sorted(found), fds=len(fds), other=[other[0]["steps"], len(other[1])])
signal.pause()
"""
)


async def test_workers_are_told_what_there_is_of_all_ranks(tmp_path: Path) -> None:
    """Offer slots of both workers, and the copies that the agent holds as a buddy."""

    async def scenario() -> None:
        async with linked(agent) as operator:
            operator.send(start(0, nnodes=2))
            await operator.workers(0)
            for rank in (2, 3):
                code, _, _ = agent.request("PUT", path(rank, 0, 5), slot(rank, 0, 5))
                assert code == 200
            operator.send(stop(0))
            await operator.state(AgentState.READY)
            operator.send(start(1))
            await operator.workers(1)

    with running(tmp_path, program(tmp_path, LOOKS)) as agent:
        await scenario()
        told = json.loads(agent.attempt_file(1, 1, "stdout.log").read_text())
    own = [[4, rank, step, True] for rank in (0, 1) for step in (4, 5)]
    # Copies that a worker has asked for are this agent's own too.
    unique = [one for at, one in enumerate(told["found"]) if one not in told["found"][:at]]
    assert unique == [*own, [4, 2, 5, True], [4, 3, 5, True]]
    assert (told["fds"], told["other"]) == (0, [[], 0])


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


async def test_a_worker_opens_only_its_own_memory_in_the_attempt_that_runs(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, ASKS), nproc=1) as agent:
        async with linked(agent) as operator:
            operator.send(start(3))
            await operator.workers(3)
        told = json.loads(agent.attempt_file(3, 0, "stdout.log").read_text())
    assert (told["own"], told["look"]) == ("", "")
    assert told["others"] == "this is rank 0, not 1"
    assert told["newer"] == "attempt 3 runs, not 4"
