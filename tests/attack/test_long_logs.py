"""The attack: a container writes 50 MiB of empty lines, and somebody reads its log.

All of the local cluster runs in one loop.  `kubectl logs` of such a pod stopped the API server, the
operator and the nodes for 4 to 6 s, and with a large `--tail` took 250 MiB.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from unbroken.local.node.logs import CHUNK, LogOptions, stream
from unbroken.local.node.processes.cri_log import LogFile

PIECES = 8
NANOSECONDS = 1_767_323_045_000_000_006


@pytest.mark.parametrize("tail", [None, 10, 10**18])
async def test_others_have_their_turns_while_a_long_log_is_read(
    tmp_path: Path, tail: int | None
) -> None:
    log, size = LogFile(str(tmp_path / "log")), 0
    log.open()
    while size < PIECES * CHUNK:
        log.write("stdout", b"\n" * 1000, NANOSECONDS)
        size = (tmp_path / "log").stat().st_size
    turns, longest, ended = 0, 0, asyncio.Event()
    ended.set()

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(other())
        async for data in stream(tmp_path / "log", LogOptions(tail_lines=tail), ended):
            longest = max(longest, len(data))
        running.cancel()
    assert turns >= PIECES
    assert longest < CHUNK
