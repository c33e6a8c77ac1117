"""Imports that a spare's agent does in advance, from the list of the gang's agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.running import Operator, Running, linked, program, running, start, stop
from unbroken.wire.agent import AgentReport, AgentState, WarmCommand

pytestmark = pytest.mark.slow

TRAIN = """
import os, signal, sys
os.write(1, b"%d\\n" % ("colorsys" in sys.modules))
import colorsys, wave
from unbroken import worker
worker.progress(1)
signal.pause()
"""
INFO = "--server-log-level=info"
PLAIN = {"UNBROKEN_AGENT_AUTH": "none"}
"""Environment for peers that are not agents and have no key."""
GATE = """
import os, sys
if "template" in sys.orig_argv:
    os.write(os.open({bell!r}, os.O_RDWR), b"here")
    os.open({gate!r}, os.O_RDONLY)
"""
"""Code in which a template waits, after it has reported that it is there."""


def answer(*modules: object) -> bytes:
    """Return the HTTP answer of an agent that knows these modules."""
    body = json.dumps({"modules": modules}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@contextlib.asynccontextmanager
async def peer(said: bytes) -> AsyncIterator[str]:
    """Yield the address of a peer that answers every request with `said`, and disconnects."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def until_parked(agent: Running) -> None:
    await asyncio.to_thread(agent.stderr.wait_for, "are parked count=2")


async def until_known(operator: Operator, count: int, *peers: str) -> None:
    """Send the peers that know what to import, until a report shows the number of modules."""
    await operator.state(AgentState.READY)
    while operator.reports[-1].imports != count:
        operator.send(WarmCommand(peers))
        operator.news.clear()
        await operator.news.wait()


async def started(operator: Operator, attempt: int = 0) -> AgentReport:
    """Start an attempt; return the report that shows how its workers were started."""
    operator.send(start(attempt))
    return await operator.workers(attempt)


async def test_a_spare_imports_what_the_workers_of_another_agent_have(tmp_path: Path) -> None:
    script = program(tmp_path, TRAIN)
    directories = [tmp_path / "one", tmp_path / "spare"]
    for directory in directories:
        directory.mkdir()
    with running(directories[0], script) as one, running(directories[1], INFO, script) as spare:
        async with linked(one) as gang, linked(spare) as operator:
            assert (await operator.state(AgentState.READY)).imports == 0
            operator.send(WarmCommand((f"127.0.0.1:{one.port}",)))
            await started(gang)
            known = (await gang.report(lambda r: bool(r.imports))).imports
            code, body, _ = one.request("GET", "/v1/imports")
            names = json.loads(body)["modules"]
            assert (code, len(names)) == (200, known)
            assert {"colorsys", "wave"} <= set(names)
            assert known is not None
            await until_known(operator, known, f"127.0.0.1:{one.port}")
            await until_parked(spare)
            report = await started(operator)
            assert [worker.start for worker in report.workers] == ["warm", "warm"]
            assert spare.attempt_file(0, 1, "stdout.log").read_text() == "1\n"


async def test_of_several_the_first_that_answers_well_is_believed(tmp_path: Path) -> None:
    half, other = answer("wave")[:-5], answer("no_such_module", "colorsys")
    with running(tmp_path, INFO, program(tmp_path, TRAIN), **PLAIN) as spare:
        async with (
            linked(spare) as operator,
            peer(half) as broken,
            peer(answer(["wave"])) as strange,
            peer(other) as good,
        ):
            await operator.state(AgentState.READY)
            operator.send(WarmCommand((broken, "no address", strange)))
            await asyncio.to_thread(
                spare.stderr.wait_for, f"imports of a peer are unknown agent={strange}"
            )
            assert operator.reports[-1].imports == 0
            await until_known(operator, 2, broken, strange, good)
            await until_parked(spare)
            report = await started(operator)
            assert [worker.start for worker in report.workers] == ["warm", "warm"]
            assert spare.attempt_file(0, 1, "stdout.log").read_text() == "1\n"


async def test_what_is_learned_later_is_imported_too(tmp_path: Path) -> None:
    with running(tmp_path, INFO, program(tmp_path, TRAIN), **PLAIN) as spare:
        async with (
            linked(spare) as operator,
            peer(answer("wave")) as one,
            peer(answer("wave", "colorsys")) as another,
        ):
            await until_known(operator, 1, one)
            await until_parked(spare)
            await until_known(operator, 2, another)
            await asyncio.to_thread(spare.stderr.wait_for, "(?s)are parked.*are parked count=2")
            await started(operator)
            assert spare.attempt_file(0, 0, "stdout.log").read_text() == "1\n"


async def test_a_start_does_not_wait_for_what_is_being_imported(tmp_path: Path) -> None:
    gate, bell = tmp_path / "gate", tmp_path / "bell"
    os.mkfifo(gate)
    os.mkfifo(bell)
    rung = os.open(bell, os.O_RDWR)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GATE.format(gate=str(gate), bell=str(bell)))
    script = program(tmp_path, TRAIN)
    with running(tmp_path, INFO, script, PYTHONPATH=str(site), **PLAIN) as spare:
        async with linked(spare) as operator, peer(answer("colorsys")) as one:
            await operator.state(AgentState.READY)
            operator.send(WarmCommand((one,)))
            assert await asyncio.to_thread(os.read, rung, 4) == b"here"
            report = await started(operator)
            assert [worker.start for worker in report.workers] == ["cold", "cold"]
            opened = os.open(gate, os.O_RDWR)
            await until_parked(spare)
            os.close(opened)
            os.close(rung)
            operator.send(stop(0))
            await operator.report(lambda r: r.state is AgentState.READY)
            report = await started(operator, 1)
            assert [worker.start for worker in report.workers] == ["warm", "warm"]


async def test_nobody_is_told_where_the_job_wants_no_warm_workers(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, TRAIN), UNBROKEN_WARM="off") as spare:
        async with linked(spare) as operator:
            assert (await operator.state(AgentState.READY)).imports is None
