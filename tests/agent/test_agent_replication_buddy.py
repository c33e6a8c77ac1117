"""Copies that a buddy accepts: whole snapshots of its job's newest attempt, sent with the key."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests.agent.running import KEY, Running, program, running
from tests.agent.snapshot_clients import NAME, Copy, copies, path, slot, whole
from tests.agent_requests import AgentRequests
from unbroken.agent.snapshots.copies import Fetch
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.wire.snapshot import BODY_AT, COPIED_AT, SEALED_AT, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def buddy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Provide an agent that has started no worker; each test has ranks of its own."""
    with started(tmp_path_factory.mktemp("buddy")) as agent:
        yield agent


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Running]:
    """Run an agent that has started no worker."""
    with running(directory, program(directory, ""), UNBROKEN_JOB="job") as agent:
        yield agent


def put(agent: Running, rank: int, point: tuple[int, int], data: bytes, **headers: str) -> int:
    """Send a copy; return the HTTP status."""
    return agent.request("PUT", path(rank, *point), data, headers)[0]


def changed(data: bytes, at: int) -> bytes:
    """Return the data with one bit flipped."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_the_newest_two_are_kept_and_given_back(buddy: Running) -> None:
    for step in (1, 2, 3):
        assert put(buddy, 0, (1, step), slot(0, 1, step)) == 200
    assert put(buddy, 0, (1, 3), slot(0, 1, 3)) == 200, "again"
    assert copies(buddy, 0) == [Copy(1, 3), Copy(1, 2)]
    assert buddy.request("GET", path(0, 1, 1))[0] == 404
    assert 0 in buddy.report().copies, "the operator is told of whom"


def test_an_older_attempts_go_when_a_newer_one_has_two(buddy: Running) -> None:
    for point in ((1, 7), (1, 8), (2, 5)):
        assert put(buddy, 10, point, slot(10, *point)) == 200
    assert copies(buddy, 10) == [Copy(2, 5), Copy(1, 8), Copy(1, 7)]
    assert put(buddy, 10, (1, 9), slot(10, 1, 9)) == 409, "its attempt is over"
    assert put(buddy, 10, (2, 6), slot(10, 2, 6)) == 200
    assert copies(buddy, 10) == [Copy(2, 6), Copy(2, 5)]


def test_what_a_sender_says_that_it_needs_is_kept(buddy: Running) -> None:
    for step, keep, kept in (
        (1, "none", [1]),
        (2, "none", [2]),
        (3, "2", [3, 2]),
        (4, "2", [4, 2]),
        (5, "4", [5, 4]),
    ):
        headers = {"Unbroken-Keep": keep}
        assert put(buddy, 11, (1, step), slot(11, 1, step), **headers) == 200
        assert [one.step for one in copies(buddy, 11)] == kept
    for point, keep, kept in (((2, 6), "none", [6, 5, 4]), ((2, 7), "6", [7, 6])):
        assert put(buddy, 11, point, slot(11, *point), **{"Unbroken-Keep": keep}) == 200
        assert [one.step for one in copies(buddy, 11)] == kept


async def test_a_holder_without_workers_is_told_by_its_address(buddy: Running) -> None:
    assert put(buddy, 12, (1, 1), slot(12, 1, 1)) == 200
    address, slots = f"127.0.0.1:{buddy.port}", SnapshotSlots()
    work = Fetch((NAME, 12), [address], KEY, None, slots.memory)
    (offer,) = await work.offers()
    brought = await work.bring([offer])
    assert brought is not None
    slots.add(work.key, offer.point, brought[0], offer.node)
    slots.begin(2)
    message = {"type": "snapshot_find", "name": NAME, "rank": 12, "attempt": 2}
    assert slots.answer(message).message["from"] == [address]
    slots.close()


def arrival(**changes: object) -> bytes:
    told = {"attempt": 0, "node": 1, "known": 0, "newest": 5, "stride": 1, "held": [3]}
    return json.dumps({**told, "is_late": False, "is_idle": False, **changes}).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (arrival(), 409),
        (arrival(newest="5"), 422),
        (arrival(newest=-1), 422),
        (arrival(held=[None]), 422),
        (arrival(held=7), 422),
        (b"[]", 422),
        (b"{", 422),
    ],
)
def test_an_agent_of_no_attempt_agrees_to_nothing(body: bytes, status: int, buddy: Running) -> None:
    assert buddy.request("POST", "/v1/snapshots/state", body)[0] == status


def newer(data: bytes) -> bytes:
    """Return a snapshot whose headers have the next version's format."""
    found = bytearray(data)
    length = len(write(whole(data)))
    for at in (COPIED_AT, SEALED_AT):
        found[at + 8] += 1
        check = crc32(found[at : at + length - 4])
        found[at + length - 4 : at + length] = check.to_bytes(4, "little")
    return bytes(found)


WHOLE = slot(3, 2, 9)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (changed(WHOLE, BODY_AT + 70_000), 422),
        (changed(WHOLE, len(WHOLE) - 1), 422),
        (changed(WHOLE, SEALED_AT + 20), 422),
        (newer(WHOLE), 422),
        (WHOLE[:SEALED_AT].ljust(BODY_AT, b"\0") + WHOLE[BODY_AT:], 422),
        (WHOLE[:-5000], 422),
        (slot(3, 2, 8), 422),
        (slot(2, 2, 9), 422),
        (slot(3, 3, 9), 422),
        (slot(3, 2, 9, job="another"), 422),
        (b"", 422),
        (b"x" * 5000, 422),
    ],
    ids=[
        *("a bit of its body", "a bit of its table", "a bit of its header", "another version"),
        *("not summed", "shorter than it says", "another step", "another rank", "another attempt"),
        *("another job", "nothing", "nonsense"),
    ],
)
def test_what_is_not_that_snapshot_leaves_nothing(data: bytes, status: int, buddy: Running) -> None:
    assert put(buddy, 3, (2, 9), data) == status
    assert copies(buddy, 3) == []
    assert buddy.request("GET", path(3, 2, 9))[0] == 404


def test_only_who_has_the_key_sends_or_reads(buddy: Running) -> None:
    assert put(buddy, 5, (1, 1), slot(5, 1, 1)) == 200
    for method, data in (("PUT", slot(5, 1, 2)), ("GET", None)):
        with contextlib.closing(AgentRequests("127.0.0.1", buddy.port, None)) as stranger:
            assert stranger.request(method, path(5, 1, 1), data, {})[0] == 401
    assert copies(buddy, 5) == [Copy(1, 1)]


def ask(agent: Running, where: str, size: int, data: bytes = b"") -> tuple[socket.socket, bytes]:
    """Offer a copy, and wait for 100 Continue or a refusal."""
    agent_requests = AgentRequests("127.0.0.1", agent.port, KEY)
    headers = {"Content-Length": str(size), "Expect": "100-continue"}
    tagged = agent_requests.tagged("PUT", where, data, headers)
    lines = [f"{name}: {value}" for name, value in tagged.items()]
    sock = agent_requests.connection.sock
    sock.sendall("\r\n".join([f"PUT {where} HTTP/1.1", "Host: x", *lines, "", ""]).encode())
    return sock, sock.recv(65536)


def test_a_transfer_that_is_cut_off_leaves_nothing(buddy: Running) -> None:
    data = slot(6, 1, 1)
    for end in (0, 100, 1023, 1024, BODY_AT, 70_000, len(data) - 1):
        sock, answer = ask(buddy, path(6, 1, 1), len(data), data)
        assert b" 100 " in answer
        sock.sendall(data[:end])
        sock.close()
        assert copies(buddy, 6) == []
    assert put(buddy, 6, (1, 1), data) == 200


def test_what_is_not_wanted_is_refused_before_it_is_sent(buddy: Running) -> None:
    assert put(buddy, 7, (4, 1), slot(7, 4, 1)) == 200
    for where, size, status in (
        (path(7, 3, 9), 5000, b" 409 "),
        (path(7, 4, 2), 1 << 50, b" 507 "),
        (path(7, 4, 1), 5000, b" 200 "),
    ):
        sock, answer = ask(buddy, where, size)
        assert status in answer
        sock.close()
    assert copies(buddy, 7) == [Copy(4, 1)]


def test_a_newer_transfer_of_a_rank_takes_the_place_of_a_hanging_one(buddy: Running) -> None:
    data = slot(8, 1, 1)
    sock, _ = ask(buddy, path(8, 1, 1), len(data), data)
    sock.sendall(data[:50_000])
    assert put(buddy, 8, (1, 2), slot(8, 1, 2)) == 200
    with contextlib.suppress(OSError):
        sock.sendall(data[50_000:])
    assert b" 409 " in sock.recv(65536)
    sock.close()
    assert copies(buddy, 8) == [Copy(1, 2)]


def test_copies_of_too_many_ranks_are_refused(tmp_path: Path) -> None:
    with started(tmp_path) as agent:
        answers = {put(agent, rank, (1, 1), slot(rank, 1, 1, 64)) for rank in range(1000, 1300)}
        assert answers == {200, 507}
        assert whole(agent.request("GET", path(1000, 1, 1))[1]).step == 1
