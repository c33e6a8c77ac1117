"""A real agent under garbage: untrusted clients on its HTTP port, and its own worker on its socket.

It must refuse both. The agent stays up, keeps its memory, and serves the operator and its other
worker meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.agent.ipc_clients import RAW
from tests.agent.running import SLEEPER, Running, linked, program, running, start
from tests.attack.listeners import Recorder, Siege, besiege, framed, resident
from unbroken.wire.agent import AgentState

pytestmark = pytest.mark.slow
START = {"rank": 0, "nnodes": 1, "faultCount": 0, "master_addr": "a", "master_port": "29401"}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, program(tmp_path, SLEEPER)) as found:
        yield found


def agents_pid(agent: Running) -> int:
    """Return the pid of the agent itself; the process that was started is its keeper."""
    text = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text()
    [pid] = map(int, text.split())
    return pid


def recorded(agent: Running, siege: Siege) -> list[bytes]:
    """Record the requests of the operator's link, and the documented bodies without a key."""
    with Recorder(siege) as recorder:
        port = urlsplit(recorder.url).port
        assert port is not None
        through = replace(agent, port=port)
        through.report()
        through.status()
        through.request("POST", "/stop", {"faultCount": 0})

        async def link() -> None:
            async with linked(through) as operator:
                await operator.state(AgentState.READY)

        asyncio.run(link())
    found = [one for one in recorder.requests if b" HTTP/1.1\r\n" in one[:2_000]]
    for path in ("/start", "/stop", "/shutdown", "/v1/snapshots", "/v1/warm"):
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\r\n"
        found.append(framed(head.encode() + json.dumps(START).encode()))
    return found


def test_garbage_on_the_agents_port_is_refused_and_the_operator_is_served(agent: Running) -> None:
    siege = Siege(("127.0.0.1", agent.port), agents_pid(agent), agent.report)
    besiege(siege, recorded(agent, siege))
    siege.check()
    assert agent.report().state is AgentState.READY, "garbage is no command"


HOSTILE = (
    RAW
    + """
import random
DOCUMENTS = [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b"null", b"\\xff\\xfe",
             b'"\\\\ud800"', b'{"type":' + b"9" * 5_000 + b"}", b"[" + b"{}," * 300_000 + b"{}]"]
KINDS = ["init", "at_rcb_barrier", "past_rcb_barrier", "job_fault", "job_data", "rank_labels",
         "ckpt_init", "ckpt_info_update", "ckpt_info_get", "snapshot_open", "snapshot_saved",
         "snapshot_used", "snapshot_find", "snapshot_fetch", "receipt", "progress", "nothing"]
VALUES = [None, True, -1, 2**63, 1e308, "", "x" * 70_000, [], {}, [[[]]],
          {"": {"": [1, "a", None]}}, "../../../etc/passwd", "\\x00", "\\ud800"]
NAMES = ["name", "rank", "attempt", "slot", "bytes", "step", "from_attempt", "everyone", "list",
         "source", "seconds", "checksum", "replicas", "data", "labels", "restart_mode", "reason",
         "message", "progress", "client_id", "local_rank"]
source = random.Random(7)

def frame(body):
    return struct.pack(">I", len(body)) + body

def garbage():
    kind = source.randrange(5)
    if kind == 0:
        return source.randbytes(source.randrange(200))
    if kind == 1:
        return frame(source.choice(DOCUMENTS))
    if kind == 2:
        return struct.pack(">I", source.choice([0, 2**31, 2**32 - 1, 17 * 2**20])) + b"x" * 100
    message = {"type": source.choice(KINDS), "local_rank": LOCAL, "client_id": ID}
    message |= {source.choice(NAMES): source.choice(VALUES) for _ in range(source.randrange(8))}
    return frame(json.dumps(message).encode())

if LOCAL == 0:
    # The honest worker asks all the while, and tells the longest wait.
    client, longest = Client(), 0.0
    client.introduce()
    tell(honest=True)
    while True:
        began = time.monotonic()
        client.say("ckpt_info_get")
        client.hear("ckpt_info_get")
        longest = max(longest, time.monotonic() - began)
        if os.path.exists("over"):
            tell(longest=longest)
            signal.pause()
        time.sleep(0.01)
tell(hostile=True)
for count in range(1_000):
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(PATH)
            for _ in range(source.randrange(1, 6)):
                sock.sendall(garbage())
    except (ConnectionError, BrokenPipeError):
        pass
tell(over=True)
signal.pause()
"""
)
"""Worker that attacks, as local rank 1, the socket that it shares with local rank 0."""


async def test_a_hostile_worker_harms_neither_the_agent_nor_its_neighbour(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, HOSTILE)) as agent:
        async with linked(agent) as operator:
            operator.send(start())
            first = await operator.workers(0)
            before = resident(agents_pid(agent))
            await asyncio.to_thread(agent.stdout.wait_for, '"over": true')
            (tmp_path / "over").touch()
            found = await asyncio.to_thread(agent.stdout.wait_for, r'"longest": ([\d.e-]+)')
            last = await operator.workers(0)
            growth = resident(agents_pid(agent)) - before
            print(  # noqa: T201  (figures for docs/guide/security.md)
                f"worker socket: 1000 connections, memory {growth / 2**20:+.1f} MiB, longest "
                f"honest wait {float(found[1]):.3f} s"
            )
            assert [one.pid for one in last.workers] == [one.pid for one in first.workers]
            assert growth < 64 << 20
