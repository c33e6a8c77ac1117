"""The operator sent its token in clear to any listener at a pod's address, and believed it.

A program with the token could start, stop and end every agent of the job, and read its snapshots.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.agent.running import KEY, SLEEPER, UID, Running, linked, program, running, start, stop
from tests.agent_requests import AgentRequests, raw_link
from tests.attack.eavesdropping import eavesdropping, replayed
from tests.attack.false_agents import FalseAgent, false_agent, until_linked
from tests.watching import PATIENCE_SECONDS
from unbroken.agent_http.peer import connected
from unbroken.errors import PeerError
from unbroken.wire.agent import AgentState
from unbroken.wire.agent_codec import encode_command
from unbroken.wire.proof import TAG_BYTES, Seal, Stranger, Unseal

pytestmark = pytest.mark.slow
OTHER_KEY = bytes(32)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    """An agent with a key, in a pod."""
    with running(tmp_path, program(tmp_path, SLEEPER)) as found:
        yield found


@pytest.mark.parametrize("size", [0, 1, 55, 56, 64, 5000])
def test_a_tag_is_the_hmac_of_the_number_and_the_message(size: int) -> None:
    seal, unseal = Seal(KEY), Unseal(KEY)
    for number in range(3):
        payload = os.urandom(size)
        message = seal(payload)
        wanted = hmac.digest(KEY, number.to_bytes(8, "big") + payload, "sha256")
        assert message == wanted[:TAG_BYTES] + payload
        assert unseal(message) == payload


# --- who listens at the address of a pod


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (FalseAgent(None, says=["plain"]), "does not prove that it has the job's key"),
        (FalseAgent(OTHER_KEY, UID, ["good"]), "does not prove that it has the job's key"),
        (FalseAgent(KEY, "uid-of-another", ["good"]), "is the agent of the pod with uid uid-of-a"),
        (FalseAgent(KEY, "", ["good"]), "is the agent of the pod with uid unknown"),
    ],
    ids=["no key", "another job's", "another pod's", "no pod's"],
)
async def test_who_is_not_the_agent_is_told_nothing_and_not_believed(
    false: FalseAgent, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Give a pod's address to a pod of another tenant, as happens while the watch lags."""
    caplog.set_level(logging.INFO)
    async with false_agent(false), linked(false.port) as operator:
        operator.send(stop(0))
        await until_linked(false, 3)
        assert (operator.reports, operator.losses) == ([], [])
    assert false.heard == []
    assert why in caplog.text


@pytest.mark.parametrize(
    ("says", "believed"),
    [
        ("good again", 1),
        ("good forged", 1),
        ("forged", 0),
        ("later", 0),
        ("good later", 1),
        ("plain", 0),
        ("good plain", 1),
    ],
)
async def test_a_report_that_is_forged_repeated_or_out_of_order_ends_the_link(
    says: str, believed: int
) -> None:
    false = FalseAgent(KEY, UID, says.split())
    async with false_agent(false), linked(false.port) as operator:
        await until_linked(false, 2)
        assert len(operator.reports) <= believed * false.links
        if believed:
            assert operator.reports


# --- who talks with an agent


async def test_the_key_is_never_sent_and_what_was_heard_is_worth_nothing(tmp_path: Path) -> None:
    """Replay all recorded messages to the same agent, and to the next one of the pod."""
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        async with eavesdropping(agent.port) as between:
            async with linked(between.port) as operator:
                operator.send(start(0))
                await operator.workers(0)
                operator.send(stop(0))
                await operator.state(AgentState.READY)
            assert KEY not in between.heard
            assert KEY.hex().encode() not in between.heard
            for said in between.down:
                answer = await replayed(agent.port, said)
                assert b"agent_id" not in answer, "it reports to nobody"
        assert agent.report().newest_attempt == 0
        assert agent.status()["status"] == "ready"
    place = tmp_path / "again"
    place.mkdir()
    with running(place, program(place, SLEEPER)) as agent:
        for said in between.down:
            assert b"agent_id" not in await replayed(agent.port, said)
        assert agent.report().newest_attempt is None


async def test_a_recorded_shutdown_ends_no_other_agent(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, SLEEPER)) as agent:
        async with eavesdropping(agent.port) as between:
            async with connected(f"127.0.0.1:{between.port}", KEY, UID) as peer:
                await peer.ask("POST", "/shutdown")
                assert (await peer.head()).status == 200
            assert await asyncio.to_thread(agent.wait) == 0
    place = tmp_path / "again"
    place.mkdir()
    with running(place, program(place, SLEEPER)) as agent:
        (said,) = between.down
        request = said[said.index(b"POST /shutdown") :]
        for data in (said, request):
            assert b" 401 " in await replayed(agent.port, data)
        assert agent.process.poll() is None


def test_a_request_is_good_once_on_its_connection_alone(agent: Running) -> None:
    with closing(AgentRequests("127.0.0.1", agent.port, KEY)) as mine:
        sent = mine.tagged("POST", "/stop", None, {})
        with closing(AgentRequests("127.0.0.1", agent.port, KEY)) as other:
            other.connection.request("POST", "/stop", headers=sent)
            assert other.connection.getresponse().status == 401
        for status in (200, 401, 401):
            mine.connection.request("POST", "/stop", headers=sent)
            answer = mine.connection.getresponse()
            answer.read()
            assert answer.status == status


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/shutdown", None, {}),
        ("/stop?x", None, {}),
        ("/stop", b'{"is_graceful": true}', {}),
        ("/stop", None, {"Unbroken-Strict": "1"}),
    ],
)
def test_what_is_not_what_the_tag_is_for_is_refused(
    agent: Running, path: str, body: bytes | None, headers: dict[str, str]
) -> None:
    with closing(AgentRequests("127.0.0.1", agent.port, KEY)) as mine:
        sent = mine.tagged("POST", "/stop", None, {}) | headers
        if body is not None:
            sent["Content-Length"] = str(len(body))
        mine.connection.request("POST", path, body, sent)
        assert mine.connection.getresponse().status == 401
    assert agent.process.poll() is None


@pytest.mark.parametrize("how", ["repeated", "forged", "skipped", "plain", "unproven"])
async def test_a_command_that_is_forged_or_repeated_is_not_followed(
    agent: Running, how: str
) -> None:
    command = encode_command(start(0)).encode()
    async with raw_link(agent.port, KEY) as link:
        await link.receive()
        sealed = link.seal(b'{"type": "dance"}')
        if how == "repeated":
            await link.socket.send_bytes(sealed)
            await link.socket.send_bytes(sealed)
        elif how == "forged":
            await link.socket.send_bytes(sealed[:16] + command)
        elif how == "skipped":
            await link.send(command)
        elif how == "plain":
            await link.socket.send_str(command.decode())
        else:
            await link.socket.send_bytes(command)
        while not link.socket.closed:
            await link.socket.receive(timeout=PATIENCE_SECONDS)
    assert agent.report().newest_attempt is None


async def test_who_links_without_the_key_hears_nothing(agent: Running) -> None:
    with pytest.raises(Stranger):
        async with raw_link(agent.port, OTHER_KEY):
            pass
    nonce = "00" * 16
    head = (
        f"GET /v1/link HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n"
        f"Unbroken-Nonce: {nonce}\r\n\r\n"
    )
    # A masked text frame, `{}`, as if there were no key.
    heard = await replayed(agent.port, head.encode() + b"\x81\x82\0\0\0\0{}")
    assert UID.encode() in heard, "the greeting"
    assert b"agent_id" not in heard


# --- buddies and our own commands


async def test_buddies_and_commands_speak_with_who_has_the_key_alone(agent: Running) -> None:
    async def check(key: bytes, uid: str | None) -> None:
        async with connected(f"127.0.0.1:{agent.port}", key, uid) as peer:
            await peer.ask("GET", "/status")
            assert (await peer.head()).status == 200

    await check(KEY, UID)
    await check(KEY, None)
    for key, uid in ((OTHER_KEY, None), (KEY, "uid-of-another")):
        with pytest.raises(Stranger):
            await check(key, uid)


@pytest.mark.parametrize("old", [b"200 OK", b'"ready"'])
async def test_an_answer_that_was_changed_on_its_way_is_not_believed(
    agent: Running, old: bytes
) -> None:
    new = b"201 OK" if old == b"200 OK" else b'"reads"'
    with pytest.raises(PeerError):
        async with (
            eavesdropping(agent.port) as between,
            connected(f"127.0.0.1:{between.port}", KEY, UID) as peer,
        ):
            between.change = lambda data: data.replace(old, new)
            await peer.ask("GET", "/status")
            await peer.text(await peer.head())


def test_an_agent_with_a_key_speaks_no_plain_protocol(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY.hex())
    given = {"UNBROKEN_AGENT_KEY_FILE": str(key), "UNBROKEN_AGENT_LINK": "off"}
    command = [sys.executable, "-m", "unbroken.agent", "train.py"]
    found = subprocess.run(
        command, env=os.environ | given, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2
    assert "UNBROKEN_AGENT_LINK=off speaks the stock agent's protocol" in found.stderr
