"""The checkpoint memory by plain HTTP: servers of several nodes in one process."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from yarl import URL

from tests.watching import PATIENCE_SECONDS, until
from unbroken.core.checkpoint_memory import (
    COPIES,
    NAMESPACES_MAX,
    SERVICE,
    NamespaceSettings,
    Shard,
    ShardKey,
    in_order,
)
from unbroken.errors import SpecError
from unbroken.nodes import checkpoint_peers, checkpoint_requests
from unbroken.nodes.checkpoint_files import CheckpointFiles, IncomingShard
from unbroken.nodes.checkpoint_peers import Contents
from unbroken.nodes.checkpoint_server import MemberOptions, serve_member

META = '{"checksum": "nUaihFhKmyOouFgTnz7GcYw==", "algorithm": "xxh3_128"}'
CREATE = "/v1/cp/namespaces/job?num_ranks=3&steps_retained=2"
HEAD = b"POST /v1/cp/checkpoints/job/0/7 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900\r\n\r\n"
WIDE = 24
OWN = {"Unbroken-Stamp": "0"}
"""Header of another member's question: the answer is from the member's own memory."""


@dataclass
class Members:
    """Servers that find each other by a list of this process."""

    folder: Path
    session: aiohttp.ClientSession
    capacity: int = 1000
    reads: int = 0
    """Times that a server has read its capacity."""
    unread: str = ""
    """Why no server can read its capacity; empty: each can."""
    ports: list[int] = field(default_factory=list)
    """Ports of all that were ever started; each on its loopback address."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)
    """Ports that are listed although nothing answers there."""
    bound: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Sockets that keep each port while no server listens there."""

    async def start(self, port: int = 0) -> int:
        """Start a server, again if its port is given; return its port."""
        if not port:
            free = self.bound.enter_context(socket.socket())
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            self.ports.append(port)
        ready = asyncio.Event()
        options = MemberOptions(
            *(self.folder / str(port), "127.0.0.1", self.read_capacity),
            *(self.addresses, port, 0.02),
            service="memory.example",
        )
        task = asyncio.ensure_future(serve_member(options, ready.set))
        self.running[port] = task
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
        return port

    async def stop(self, port: int) -> None:
        """End a server; its files stay."""
        task = self.running.pop(port)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def read_capacity(self) -> int:
        """Return the bytes of each server."""
        self.reads += 1
        if self.unread:
            raise SpecError(self.unread)
        return self.capacity

    async def addresses(self) -> Iterable[str]:
        """Return the addresses of those that run, and of those that are only listed."""
        return [f"127.0.0.1:{port}" for port in self.listed.union(self.running)]

    async def ask(self, port: int, method: str, path: str, **more: Any) -> tuple[int, bytes, Any]:
        """Return status, body and headers of an answer."""
        url = f"http://127.0.0.1:{port}{path}"
        async with self.session.request(method, url, **more) as answer:
            return answer.status, await answer.read(), answer.headers

    async def put(self, port: int, rank: int, step: int, data: bytes = b"bytes") -> int:
        """Save a shard; return the status."""
        path = f"/v1/cp/checkpoints/job/{rank}/{step}"
        answer = await self.ask(port, "POST", path, data=data, headers={"Shard-Meta": META})
        return answer[0]

    async def get(self, port: int, rank: int, step: int) -> bytes | None:
        """Load a shard; None: 404."""
        path = f"/v1/cp/checkpoints/job/{rank}/{step}"
        status, body, headers = await self.ask(port, "GET", path)
        if status == 404:
            return None
        assert (status, headers["Shard-Meta"]) == (200, META)
        assert int(headers["Content-Length"]) == len(body)
        return body

    async def hold(self, count: int) -> None:
        """Return once all servers together hold so many shards of the job."""

        async def held() -> int:
            contents = await self.contents()
            return sum(len(one.shards.get("job", ())) for one in contents)

        await until(held, lambda total: total == count)

    async def contents(self) -> list[Contents]:
        """Return the contents of each server."""
        path = "/v1/members/contents"
        answers = [(await self.ask(port, "GET", path))[1] for port in self.running]
        return [msgspec.json.decode(answer, type=Contents) for answer in answers]


@asynccontextmanager
async def members(folder: Path, count: int, capacity: int = 1000) -> AsyncIterator[Members]:
    """Run so many servers, which know each other, and a namespace."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Members(folder, session, capacity)
        await stack.enter_async_context(made.bound)
        stack.push_async_callback(_stop_all, made)
        for _ in range(count):
            await made.start()
        await until(made.contents, lambda contents: all(one.members == count for one in contents))
        if count:
            assert (await made.ask(made.ports[0], "POST", CREATE))[0] == 200
        yield made


async def _stop_all(made: Members) -> None:
    for port in list(made.running):
        await made.stop(port)


async def test_any_member_answers_for_all(tmp_path: Path) -> None:
    async with members(tmp_path, 4) as made:
        for rank, port in enumerate(made.ports[1:]):
            assert await made.put(port, rank, 7, b"%d" % rank) == 200
        for port in made.ports:
            found = [await made.get(port, rank, 7) for rank in range(3)]
            assert found == [b"0", b"1", b"2"]
            assert (await made.ask(port, "GET", "/v1/cp/checkpoints/job/latest"))[1] == b"[7]"
            assert (await made.ask(port, "GET", "/v1/cp/namespaces/job"))[0] == 200
        # Two copies of each, and no more.
        await made.hold(6)


async def test_ranks_that_save_at_once_are_all_answered(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        # The server accepts nothing before all are there.
        clients = _connected(made.ports[0], 300)
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.sock_recv(client, 12) for client in clients))
        assert set(answers) == {b"HTTP/1.1 200"}
        for client in clients:
            client.close()


def _connected(port: int, count: int) -> list[socket.socket]:
    """Return connections that were made one after the other, while the event loop stands still."""
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        client.setblocking(False)
        clients.append(client)
    return clients


async def test_a_lost_member_loses_nothing_one_after_the_other(tmp_path: Path) -> None:
    async with members(tmp_path, 4) as made:
        for rank in range(3):
            assert await made.put(made.ports[0], rank, 7, b"%d" % rank) == 200
        await made.hold(6)
        for port in made.ports[:2]:
            await made.stop(port)
            await made.hold(6)
            found = [await made.get(made.ports[3], rank, 7) for rank in range(3)]
            assert found == [b"0", b"1", b"2"]


async def save_wide(made: Members) -> None:
    """Save a step of WIDE ranks, whose shards are spread over all servers."""
    path = f"/v1/cp/namespaces/wide?num_ranks={WIDE}"
    assert (await made.ask(made.ports[0], "POST", path))[0] == 200
    for rank in range(WIDE):
        path = f"/v1/cp/checkpoints/wide/{rank}/7"
        assert (await made.ask(made.ports[0], "POST", path, data=b"%d" % rank))[0] == 200


async def wide_ranks(made: Members) -> list[set[int]]:
    """Return the ranks of that step at each server."""
    contents = await made.contents()
    return [{held.rank for held in one.shards.get("wide", ())} for one in contents]


def wide_places(made: Members) -> list[set[int]]:
    """Return the ranks of that step that belong to each server."""
    addresses = [f"127.0.0.1:{port}" for port in made.running]
    return [
        {rank for rank in range(WIDE) if one in in_order(addresses, "wide", rank)[:COPIES]}
        for one in addresses
    ]


async def test_a_member_that_does_not_answer_is_replaced_by_the_next(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made:
        lost = made.ports[2]
        await made.stop(lost)
        made.listed.add(lost)
        await until(made.contents, lambda contents: all(one.members == 3 for one in contents))
        await save_wide(made)
        assert await wide_ranks(made) == [set(range(WIDE))] * 2
        await made.start(lost)
        expected = wide_places(made)
        assert await until(partial(wide_ranks, made), lambda found: found == expected)


async def test_a_copy_to_a_member_that_stalls_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_peers, "STALL_SECONDS", 0.5)
    # The time for the size, which is far longer for a large shard, does not end it here.
    monkeypatch.setattr(checkpoint_peers, "ANSWER_SECONDS", 3600.0)
    async with members(tmp_path, 2, capacity=64 << 20) as made:
        # The kernel takes connections and some bytes for a program that reads none.
        with socket.create_server(("127.0.0.1", 0)) as stalled:
            port = stalled.getsockname()[1]
            made.listed.add(port)
            await until(made.contents, lambda contents: all(one.members == 3 for one in contents))
            addresses = await made.addresses()
            rank = next(
                one
                for one in range(99)
                if f"127.0.0.1:{port}" in in_order(addresses, "job", one)[:COPIES]
            )
            path, data = f"/v1/cp/checkpoints/job/{rank}/7", io.BytesIO(bytes(24 << 20))
            assert (await made.ask(made.ports[0], "POST", path, data=data))[0] == 200
        made.listed.clear()
        await made.hold(2)


async def test_all_that_a_member_lists_can_be_fetched_after_another_has_joined(
    tmp_path: Path,
) -> None:
    """Both members that hold a shard send it to the one that joins."""
    async with members(tmp_path, 2) as made:
        await save_wide(made)
        await made.start()
        expected = wide_places(made)
        await until(partial(wide_ranks, made), lambda found: found[2] == expected[2])
        assert expected[2]
        for port, listed in zip(made.running, expected, strict=True):
            for rank in listed:
                path = f"/v1/cp/checkpoints/wide/{rank}/7"
                status, body, _ = await made.ask(port, "GET", path, headers=OWN)
                assert (status, body) == (200, b"%d" % rank)


async def test_a_shard_without_a_file_stops_no_repair(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        for rank in range(3):
            assert await made.put(port, rank, 7) == 200
        for file in (tmp_path / str(port) / "namespaces/job").glob("1.7.*"):
            file.unlink()
        await made.start()
        await made.hold(4)
        assert await made.get(made.ports[1], 2, 7) == b"bytes"
        assert await made.get(port, 1, 7) is None
        assert not made.running[port].done()


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "", "localhost", "node-1", "224.0.0.1", "::ffff:10.0.0.1", "fe80::1%1"],
)
async def test_a_member_has_one_address_of_its_own(tmp_path: Path, host: str) -> None:
    """By another one it would take itself for a second member, and send itself its shards."""

    async def nobody() -> Iterable[str]:
        return ()

    with pytest.raises(SpecError, match="--host: expected"):
        await serve_member(MemberOptions(tmp_path, host, lambda: 1000, nobody))


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Origin", "http://evil.example", 403),
        ("Origin", "null", 403),
        ("Sec-Fetch-Site", "same-origin", 403),
        *(
            ("Host", host, 421)
            for host in (
                *("evil.example", "evil.example:9200", "localhost.evil.example", "x", "[::1].x"),
                *(f"{SERVICE}.evil.example:9200", "aws-hyperpod.svc.cluster.local", "127.0.0.1.x"),
                *("ai-toolkit-gossip-headless.evil.example", "svc.other", ":9200"),
            )
        ),
    ],
)
async def test_a_page_of_a_browser_has_no_access(
    tmp_path: Path, method: str, header: str, value: str, status: int
) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        assert await made.put(port, 0, 7) == 200
        path = "/v1/cp/checkpoints/job/0/7"
        assert (await made.ask(port, method, path, headers={header: value}))[0] == status
        assert await made.get(port, 0, 7) == b"bytes"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "10.0.0.7:9200", "[::1]:9200", "[fd00::1]", "localhost", "LocalHost:9200"),
        *(SERVICE, f"{SERVICE}:9200", f"{SERVICE}.:9200", "ai-toolkit-gossip-headless:9200"),
        *("ai-toolkit-gossip-headless.aws-hyperpod", "ai-toolkit-gossip-headless.aws-hyperpod.svc"),
        "memory.example:9200",
    ],
)
async def test_a_client_has_access_by_any_name_of_the_members(tmp_path: Path, host: str) -> None:
    async with members(tmp_path, 1) as made:
        answer = await made.ask(made.ports[0], "GET", "/health", headers={"Host": host})
        assert answer[0] == 200


async def test_a_new_process_finds_what_the_old_one_kept(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        assert await made.put(port, 0, 7, b"seven") == 200
        incoming = tmp_path / str(port) / "incoming/1"
        await made.stop(port)
        incoming.write_bytes(b"half of one")
        await made.start(port)
        assert await made.get(port, 0, 7) == b"seven"
        assert (await made.ask(port, "POST", CREATE))[0] == 409
        assert not incoming.exists()


async def test_half_of_a_shard_is_never_kept(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made:
        port = made.ports[0]
        assert await made.put(port, 0, 7, b"whole") == 200
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"half")
        await writer.drain()
        incoming = tmp_path / str(port) / "incoming"
        await until(lambda: os.listdir(incoming))
        writer.close()
        await until(lambda: not os.listdir(incoming))
        assert await made.get(port, 0, 7) == b"whole"
        # The memory that was reserved for it is free again.
        assert await made.put(port, 1, 7, b"x" * 900) == 200


async def test_a_step_that_is_saved_again_is_whole_only_with_its_metadata(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made:
        for rank in range(3):
            assert await made.put(made.ports[0], rank, 7, b"first") == 200
        assert await made.put(made.ports[1], 0, 7, b"second") == 200
        assert await made.get(made.ports[2], 0, 7) == b"second"
        assert await made.get(made.ports[2], 2, 7) is None
        assert await made.put(made.ports[1], 2, 7, b"second") == 200
        assert await made.get(made.ports[2], 2, 7) == b"second"


async def test_a_job_that_grows_loses_no_shard(tmp_path: Path) -> None:
    """Its namespace was made for fewer ranks; its metadata was where now a rank is."""
    async with members(tmp_path, 3) as made:
        latest = "/v1/cp/checkpoints/job/latest"
        for rank in (2, 3, 0, 1):
            assert await made.put(made.ports[rank % 3], rank, 8, b"%d" % rank) == 200
        assert (await made.ask(made.ports[0], "GET", latest))[1] == b"[]"
        assert await made.put(made.ports[0], 4, 8, b"4") == 200
        for port in made.ports:
            found = [await made.get(port, rank, 8) for rank in range(5)]
            assert found == [b"0", b"1", b"2", b"3", b"4"]
            assert (await made.ask(port, "GET", latest))[1] == b"[8]"


async def test_metadata_that_a_member_gives_back_makes_no_step_whole(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        path, latest = "/v1/cp/checkpoints/job", "/v1/cp/checkpoints/job/latest"
        for rank in range(2):
            assert await made.put(port, rank, 7) == 200
        # A member that was away has the metadata of the save before.
        headers = {"Unbroken-Stamp": "5", "Shard-Meta": META}
        assert (await made.ask(port, "POST", f"{path}/2/7", data=b"x", headers=headers))[0] == 200
        assert (await made.ask(port, "GET", latest))[1] == b"[]"
        assert await made.get(port, 2, 7) is None


async def test_a_namespace_of_metadata_alone_has_no_step_at_first(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        path = "/v1/cp/namespaces/alone?num_ranks=1"
        assert (await made.ask(port, "POST", path))[0] == 200
        path = "/v1/cp/checkpoints/alone/0/7"
        status, body, _ = await made.ask(port, "GET", path)
        assert (status, b"has no step 7 of rank 0" in body) == (404, True)
        assert (await made.ask(port, "POST", path, data=b"x"))[0] == 200
        assert (await made.ask(port, "GET", path))[1] == b"x"


async def test_metadata_is_newer_than_shards_of_a_clock_that_is_ahead(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        path = "/v1/cp/checkpoints/job"
        for rank in range(2):
            headers = {"Unbroken-Stamp": str(2**62 + rank), "Shard-Meta": META}
            answer = await made.ask(port, "POST", f"{path}/{rank}/7", data=b"x", headers=headers)
            assert answer[0] == 200
        assert await made.put(port, 2, 7) == 200
        assert (await made.ask(port, "GET", f"{path}/latest"))[1] == b"[7]"


async def test_an_upload_that_stalls_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_requests, "PAUSE_SECONDS", 0.05)
    async with members(tmp_path, 1) as made:
        (port,) = made.ports
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"half")
        assert b" 408 " in await reader.readline()
        incoming = tmp_path / str(port) / "incoming"
        await until(lambda: not os.listdir(incoming))
        # The memory that was reserved for it is free again.
        assert await made.put(port, 1, 7, b"x" * 900) == 200
        writer.close()


def test_a_namespace_that_makes_room_leaves_no_file(tmp_path: Path) -> None:
    settings = NamespaceSettings(3, 2, 1)
    files = CheckpointFiles(tmp_path, 1000)
    files.open()
    for number in range(NAMESPACES_MAX):
        assert files.configure(f"job-{number}", settings) is None
    incoming = files.receive(Shard(ShardKey("job-1", 0, 7), 0, 1, META))
    assert isinstance(incoming, IncomingShard)
    with incoming:
        files.keep(incoming, 2)
    assert files.configure("one-more", settings) is not None
    folder = tmp_path / "namespaces/job-1"
    assert len(os.listdir(folder)) == 2
    # Its last use, after a restart.
    os.utime(folder, (0, 0))
    files = CheckpointFiles(tmp_path, 1000)
    files.open()
    # Another member that still has a namespace deletes none here.
    assert files.configure("one-more", settings, makes_room=False) is not None
    assert files.configure("one-more", settings) is None
    assert not folder.exists()
    assert len(os.listdir(tmp_path / "namespaces")) == NAMESPACES_MAX


async def test_a_server_follows_the_size_of_its_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with members(tmp_path, 2, capacity=100) as made:
        port = made.ports[0]
        for step in (7, 8):
            assert await made.put(port, 0, step, b"x" * 40) == 200
        await made.hold(4)
        made.capacity = 50
        await made.hold(2)
        assert await made.get(port, 0, 7) is None
        assert await made.get(port, 0, 8) == b"x" * 40
        assert _steps_of_files(tmp_path) == ["8", "8"]
        made.capacity, made.unread = 100, "no size"
        await until(lambda: caplog.text.count("not resized") == 2)
        assert await made.put(port, 0, 9, b"x" * 60) == 507
        made.unread = ""

        async def capacities() -> list[int]:
            return [one.capacity_bytes for one in await made.contents()]

        await until(capacities, lambda found: found == [100, 100])
        assert await made.put(port, 0, 9, b"x" * 60) == 200
        await made.hold(4)
        # The same problem is news again once each server has read its capacity meanwhile.
        for _ in range(2):
            caplog.clear()
            made.reads, made.unread = 0, ""
            await until(lambda: made.reads >= 4)
            made.unread = "no size"
            await until(lambda: caplog.text.count("not resized") == 2)


def _steps_of_files(folder: Path) -> list[str]:
    return [path.name.split(".")[1] for path in folder.rglob("*.shard")]


async def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with members(tmp_path, 1, capacity=100) as made:
        (port,) = made.ports
        path = "/v1/cp/checkpoints/job/0/7"
        status, body, _ = await made.ask(port, "POST", path, data=b"x" * 101)
        assert status == 507
        assert b"no memory for 101 bytes of rank 0 at step 7: 0 of 100 bytes" in body
        assert await made.put(port, 0, 7, b"x" * 100) == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/cp/namespaces/other", 404, "namespace 'other' is unknown"),
        ("DELETE", "/v1/cp/namespaces/other", 404, "namespace 'other' is unknown"),
        ("POST", CREATE, 409, "exists already"),
        ("GET", "/v1/cp/namespaces/..%2F..%2Fetc", 400, "expected 1 to 128 letters"),
        ("POST", "/v1/cp/checkpoints/..%2Fx/0/1", 400, "expected 1 to 128 letters"),
        ("GET", "/v1/cp/checkpoints/job/..%2F/1", 400, "is not a whole number"),
        ("GET", "/v1/cp/checkpoints/job/0/1e3", 400, "is not a whole number"),
        ("POST", "/v1/cp/checkpoints/other/0/1", 404, "namespace 'other' is unknown"),
        ("POST", "/v1/cp/namespaces/x", 400, "num_ranks: '' is not a number"),
        ("POST", "/v1/cp/namespaces/x?num_ranks=0", 400, "num_ranks: '0' is not a number"),
        ("POST", f"/v1/cp/namespaces/x?num_ranks={'9' * 5000}", 400, "num_ranks"),
        ("POST", "/v1/cp/namespaces/x?num_ranks=2&steps_retained=101", 400, "steps_retained"),
        ("GET", "/v1/cp/checkpoints/job/latest?limit=-1", 400, "limit"),
        ("GET", "/v1/cp/checkpoints/job/0/1", 404, "has no step 1 of rank 0"),
        ("DELETE", "/v1/cp/checkpoints/job/0/1", 404, "has no step 1 of rank 0"),
        ("POST", "/v1/cp/cluster/reset", 403, "would delete the checkpoints of all jobs"),
        ("GET", "/health", 200, "healthy"),
        ("GET", "/", 404, ""),
    ],
)
async def test_an_answer_says_what_is_wrong(
    tmp_path: Path, method: str, path: str, status: int, said: str
) -> None:
    async with members(tmp_path, 1) as made:
        url = f"http://127.0.0.1:{made.ports[0]}{path}"
        async with made.session.request(method, URL(url, encoded=True)) as answer:
            assert (answer.status, said in await answer.text()) == (status, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Shard-Meta": "x" * 121}, 400),
        ({"Unbroken-Stamp": "x"}, 400),
        ({"Unbroken-Stamp": "-1"}, 400),
        ({"Unbroken-Stamp": "9" * 30}, 400),
        ({"Transfer-Encoding": "chunked"}, 411),
    ],
)
async def test_a_hostile_header_is_refused(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with members(tmp_path, 1) as made:
        path = "/v1/cp/checkpoints/job/0/1"
        data = _pieces() if "Transfer-Encoding" in headers else b"x"
        headers = {} if "Transfer-Encoding" in headers else headers
        assert (await made.ask(made.ports[0], "POST", path, data=data, headers=headers))[
            0
        ] == status
        assert await made.get(made.ports[0], 0, 1) is None


async def _pieces() -> AsyncIterator[bytes]:
    yield b"x"


async def test_a_deleted_namespace_is_gone_everywhere(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made:
        for rank in range(3):
            assert await made.put(made.ports[0], rank, 7) == 200
        assert (await made.ask(made.ports[1], "DELETE", "/v1/cp/checkpoints/job/0/7"))[0] == 200
        assert await made.get(made.ports[2], 0, 7) is None
        assert (await made.ask(made.ports[1], "DELETE", "/v1/cp/namespaces/job"))[0] == 200
        for port in made.ports:
            assert (await made.ask(port, "GET", "/v1/cp/namespaces/job"))[0] == 404
        await made.hold(0)
