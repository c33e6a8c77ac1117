"""What was saved in the checkpoint memory is found, whatever servers and clients are lost."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.nodes.test_checkpoint_server import Members, members
from tests.watching import until
from unbroken.nodes import checkpoint_peers
from unbroken.nodes.checkpoint_peers import STAMP_HEADER, Contents, HeldShard
from unbroken.nodes.checkpoint_server import JOINED_PATH, MemberOptions, serve_member

RANKS = 2


@dataclass
class Other:
    """A member of the test's own, with all shards of step 7."""

    answers: bool = True
    """False: it breaks off each connection."""
    asked: list[str] = field(default_factory=list)
    """Paths."""

    async def answer(self, request: web.Request) -> web.Response:
        """Answer any request of a member."""
        self.asked.append(request.path)
        if not self.answers:
            assert request.transport is not None
            request.transport.abort()
        if request.path.startswith("/v1/cp/checkpoints/"):
            return web.Response(body=bytes(3 << 20))
        shards = {"job": [HeldShard(rank, 7, 1 + rank) for rank in range(RANKS + 1)]}
        return web.Response(body=msgspec.json.encode(Contents(1000, 15, 2, {}, shards)))


@asynccontextmanager
async def with_other(folder: Path, *, answers: bool) -> AsyncIterator[tuple[Members, Other]]:
    """Run one server, and a member of the test's own beside it."""
    other = Other(answers=answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", other.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with members(folder, 0) as made:
            made.listed.add(port)
            await made.start()
            path = "/v1/cp/namespaces/job?num_ranks=3&steps_retained=2"
            assert (await made.ask(made.ports[0], "POST", path))[0] == 200
            yield made, other
    finally:
        await runner.cleanup()


async def listed(made: Members, port: int) -> list[int]:
    """Return the newest whole steps by one server."""
    status, body, _ = await made.ask(port, "GET", "/v1/cp/checkpoints/job/latest")
    assert status == 200, body
    return msgspec.json.decode(body, type=list[int])


async def test_a_member_that_was_silent_is_asked_for_the_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is shown no step begins anew."""
    monkeypatch.setattr(checkpoint_peers, "SILENT_SECONDS", 3600.0)
    async with with_other(tmp_path, answers=False) as (made, other):
        await until(lambda: other.asked)
        assert await listed(made, made.ports[0]) == []
        other.answers = True
        await until(lambda: listed(made, made.ports[0]), lambda steps: steps == [7])


async def test_a_member_that_was_silent_is_asked_for_a_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_peers, "SILENT_SECONDS", 3600.0)
    path = "/v1/cp/checkpoints/job/0/7"
    async with with_other(tmp_path, answers=False) as (made, other):
        await until(lambda: other.asked)
        assert await listed(made, made.ports[0]) == []
        other.answers = True

        async def copied() -> bool:
            assert await made.put(made.ports[0], 0, 7) == 200
            return path in other.asked

        await until(copied)


async def test_a_member_is_told_again_that_another_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of members may be the same as before: nothing else says that copies are missing."""
    monkeypatch.setattr(checkpoint_peers, "SILENT_SECONDS", 0.0)
    async with with_other(tmp_path, answers=False) as (_, other):
        await until(lambda: other.asked.count(JOINED_PATH) > 1)
        other.answers = True
        await until(lambda: other.asked[-1] != JOINED_PATH)


async def test_a_client_that_goes_makes_no_member_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection ends before a piece is written, and the server does not know yet."""
    write = web.StreamResponse.write

    async def cut(response: web.StreamResponse, data: bytes) -> None:
        request = response._req
        assert request is not None
        assert request.transport is not None
        if STAMP_HEADER not in request.headers:
            request.transport.abort()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", cut)
    async with with_other(tmp_path, answers=True) as (made, other):
        with pytest.raises(aiohttp.ClientError):
            await made.ask(made.ports[0], "GET", "/v1/cp/checkpoints/job/0/7")
        assert "/v1/cp/checkpoints/job/0/7" in other.asked
        assert "does not answer" not in caplog.text


async def test_a_server_answers_nobody_before_it_knows_the_others(tmp_path: Path) -> None:
    """Alone it would list only the steps of its own shards."""
    asked, known, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def find() -> Iterable[str]:
        asked.set()
        await known.wait()
        return ()

    with socket.socket() as free:
        # Nothing else gets the port meanwhile.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        options = MemberOptions(tmp_path, "127.0.0.1", lambda: 1000, find, port)
        serving = asyncio.ensure_future(serve_member(options, ready.set))
        await asked.wait()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        known.set()
        await ready.wait()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


class Saving:
    """A job that saves step after step, each shard by any server that runs."""

    def __init__(self, made: Members, chosen: random.Random) -> None:
        self.made = made
        self.chosen = chosen
        self.step = 0
        self.confirmed = 0
        """The newest step that was saved while two servers ran at each moment."""
        self.fewest = 0
        """Servers that ran at some moment of this save."""

    async def save(self) -> None:
        """Save one more step."""
        self.step += 1
        self.fewest = len(self.made.running)
        ranks = await asyncio.gather(*(self._put(rank) for rank in range(RANKS)))
        if all(ranks) and await self._put(RANKS) and self.fewest > 1:
            self.confirmed = self.step

    async def _put(self, rank: int) -> bool:
        if not self.made.running:
            return False
        port = self.chosen.choice(list(self.made.running))
        with suppress(aiohttp.ClientError):
            return await self.made.put(port, rank, self.step, bytes(1000)) == 200
        return False

    def down(self) -> list[int]:
        """Servers that were killed; they stay listed."""
        return [port for port in self.made.ports if port not in self.made.running]

    async def change(self) -> None:
        """Kill some servers, or start some of those that were killed."""
        if self.chosen.random() < 0.5:
            some = self._some(list(self.made.running))
            self.made.listed.update(some)
            await asyncio.gather(*(self._stop(port) for port in some))
        else:
            await self.start(self._some(self.down()))

    def _some(self, ports: list[int]) -> list[int]:
        count = self.chosen.choice([1, 1, 2, len(ports)])
        return self.chosen.sample(ports, min(count, len(ports)))

    async def start(self, ports: list[int]) -> None:
        """Start servers, one after the other."""
        for port in ports:
            await self.made.start(port)

    async def _stop(self, port: int) -> None:
        self.fewest = min(self.fewest, len(self.made.running) - 1)
        await self.made.stop(port)


@pytest.mark.parametrize("seed", range(9))
async def test_a_lost_node_takes_no_step_whatever_servers_were_killed_before(
    tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    async with members(tmp_path, chosen.choice([3, 4]), capacity=1 << 20) as made:
        saving = Saving(made, chosen)
        # Two steps are retained: the newest may be one that failed.
        while not saving.confirmed or saving.step > saving.confirmed + 1 or chosen.random() < 0.8:
            await asyncio.gather(saving.save(), saving.change())
            for _ in range(chosen.randrange(4)):
                await saving.save()
        lost = chosen.choice(made.ports)
        await saving.start([port for port in saving.down() if port != lost])
        if lost in made.running:
            await made.stop(lost)
        shutil.rmtree(tmp_path / str(lost))
        # Some servers may take long to learn it.
        made.listed = {lost} if chosen.random() < 0.5 else set()
        for port in made.running:
            # As AWS's client does: ranks of a save that failed may be listed as well.
            steps = [step for step in await listed(made, port) if await made.get(port, RANKS, step)]
            assert steps[:1] >= [saving.confirmed], saving.step
            for rank in range(RANKS):
                assert await made.get(port, rank, steps[0])
