"""Seconds that a snapshot takes to its buddy and back, with real agents over HTTP on this machine.

One agent's worker saves, and a second agent is its buddy. The first agent is killed, and a worker
of a third agent restores from the buddy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.agent.running import Running, linked, program, running, start
from unbroken.agent.snapshots.replication import VARIABLE

UNBOUND = str(100_000_000_000)
"""Bytes a second: so high a bound that the measurement shows the greatest speed."""
BOUND_SECONDS = 300.0
STEP = 7
WORKER = f"""
import json, os, signal, sys, time
import torch
from unbroken import worker
count, size = int(sys.argv[1]), int(sys.argv[2])
state = {{str(one): torch.zeros(size) for one in range(count)}}
snapshot = worker.Snapshot(**state)
began = time.perf_counter()
found = snapshot.restore()
seconds = time.perf_counter() - began
if found is None:
    for number, one in enumerate(state.values()):
        one.fill_(number + 1)
    assert snapshot.save({STEP})
    snapshot.flush()
    told = dict(at=time.time())
else:
    right = all(bool((one == number + 1).all()) for number, one in enumerate(state.values()))
    told = dict(seconds=seconds, source=found.source, step=found.step, right=right)
os.write(1, (json.dumps(told) + "\\n").encode())
signal.pause()
"""


async def _told(agent: Running, attempt: int) -> dict[str, object]:
    """Return the record that the agent's worker prints, once its log has it."""
    path = agent.attempt_file(attempt, 0, "stdout.log")
    await _until(lambda: path.read_text().endswith("\n"))
    found: dict[str, object] = json.loads(path.read_text().splitlines()[0])
    return found


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        while not await asyncio.to_thread(holds):
            continue


def _has(agent: Running) -> bool:
    code, body, _ = agent.request("GET", "/v1/snapshots/training/0")
    return code == 200 and any(one["step"] == STEP for one in json.loads(body)["snapshots"])


async def _round(directory: Path, count: int, size: int) -> tuple[float, float]:
    with ExitStack() as stack:
        agents = []
        for name in ("saves", "buddy", "restores"):
            folder = directory / name
            folder.mkdir()
            small = name == "buddy"
            words = (program(folder, WORKER), str(count), str(1 if small else size))
            environ = {VARIABLE: UNBOUND, "UNBROKEN_JOB": "bench", "UNBROKEN_WARM": "off"}
            agents.append(stack.enter_context(running(folder, *words, nproc=1, **environ)))
        saves, buddy, restores = agents
        where = f"127.0.0.1:{buddy.port}"
        async with linked(saves) as operator, linked(buddy) as middle, linked(restores) as other:
            middle.send(start(0, rank=1, nnodes=2, buddy=f"127.0.0.1:{saves.port}"))
            await middle.workers(0)
            operator.send(start(0, nnodes=2, buddy=where))
            await operator.workers(0)
            await _until(lambda: _has(buddy))
            sent = time.time() - float(str((await _told(saves, 0))["at"]))
            saves.process.kill()
            other.send(start(1, nnodes=2, holders=(where,)))
            await other.workers(1)
            found = await _told(restores, 1)
    if not found.get("right") or not str(found.get("source")).startswith("buddy"):
        raise SystemExit(f"what the buddy has was not restored: {found}")
    return max(0.0, sent), float(str(found["seconds"]))


def measure(count: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round."""
    told: dict[str, list[float]] = {"save done to buddy has it": [], "restore from buddy": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            sent, restored = asyncio.run(_round(Path(folder), count, size))
        told["save done to buddy has it"].append(sent)
        told["restore from buddy"].append(restored)
    return told
