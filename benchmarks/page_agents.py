"""Made-up agents for `page.py`: each at an address of its own, with the proof of a real one.

They answer `GET /v1/report` with what an agent reports whose ranks train.  Each pod comes as a line
of JSON on stdin; "ready" is written once all listen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from unbroken.wire.agent import PORT, AgentReport, AgentState, WorkerReport
from unbroken.wire.agent_codec import encode_report
from unbroken.wire.observation import RankWatch
from unbroken.wire.proof import (
    DIGEST_HEADER,
    HELLO_PATH,
    NONCE_HEADER,
    TAG_HEADER,
    Session,
    answer_tag,
    digest_of,
    greeting,
)

STEP_SECONDS = 0.5
_STEP, _SIGN, _RANK = 7_000_000_001, 7_000_000_002, 7_000_000_100
LATE_RANK = 4711
"""A rank of the large job that has been silent since the start."""


def template(ranks: list[int]) -> str:
    """The report of an agent, with places for the step and for the time of the last sign."""
    workers = tuple(
        WorkerReport(i, _RANK + i, 100 + i, "running", 1.7e9, first_output_at=1.7e9, start="warm")
        for i in range(len(ranks))
    )
    watch = tuple(
        RankWatch(
            _RANK + i, "train", _STEP, float(_SIGN), STEP_SECONDS, float(_SIGN), 30.0,
            metrics={"loss": 2.5, "grad_norm": 1.25, "lr": 0.0003}, first_step=0,
            first_step_at=1.7e9, bound="steps", look_seconds=20.0, act_seconds=25.0,
        )
        for i in range(len(ranks))
    )  # fmt: skip
    report = AgentReport(
        "agent", AgentState.RUNNING, newest_attempt=1, attempt=1, rank=ranks[0] // len(ranks),
        nproc=len(ranks), pid=17, master_addr="127.0.0.1", master_port=29500,
        agent_version="0.1.0", workers=workers, watch=watch,
    )  # fmt: skip
    text = encode_report(report).replace("%", "%%")
    text = re.sub(rf"{_STEP}(\.0)?", "%(step)d", text)
    text = re.sub(rf"{_SIGN}(\.0)?", "%(sign).3f", text)
    for i, rank in enumerate(ranks):
        text = text.replace(str(_RANK + i), str(rank))
    return text


@dataclass
class Agent:
    """One agent."""

    address: str
    uid: str
    key: bytes
    text: str
    is_late: bool
    began: float

    def report(self) -> bytes:
        """Return the report of now."""
        now = self.began if self.is_late else time.time()
        return (self.text % {"step": int(now / STEP_SECONDS) % 10**7, "sign": now}).encode()


def agent_of(pod: dict[str, Any], began: float) -> Agent:
    """Return the agent of a pod."""
    is_late = pod["job"] == 0 and LATE_RANK in pod["ranks"]
    key = bytes.fromhex(pod["key"])
    return Agent(pod["address"], pod["uid"], key, template(pod["ranks"]), is_late, began)


class Connection(asyncio.Protocol):
    """A connection of a caller, which first asks for the proof of the key."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rest = b""
        self._asked = 0
        self._session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while b"\r\n\r\n" in self._rest:
            head, _, self._rest = self._rest.partition(b"\r\n\r\n")
            self._answer(head.decode())

    def _answer(self, head: str) -> None:
        first, *rows = head.split("\r\n")
        path = first.split(" ")[1]
        if path == HELLO_PATH:
            nonce = dict(row.split(": ", 1) for row in rows)[NONCE_HEADER]
            body, self._session = greeting(
                self._agent.key, bytes.fromhex(nonce), os.urandom(16), self._agent.uid, path
            )
            self._asked = 0
            self._write(body, "")
            return
        assert self._session is not None
        body = self._agent.report()
        digest = digest_of(body)
        tag = answer_tag(self._session, self._asked, 200, digest)
        self._asked += 1
        self._write(body, f"{DIGEST_HEADER}: {digest}\r\n{TAG_HEADER}: {tag}\r\n")

    def _write(self, body: bytes, more: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self._transport.write(head.encode() + body)


async def serve(pods: list[dict[str, Any]]) -> None:
    """Listen for all of them until stdin ends."""
    loop = asyncio.get_running_loop()
    began = time.time()
    for pod in pods:
        agent = agent_of(pod, began)
        listener = socket.create_server((agent.address, PORT), backlog=64)
        await loop.create_server(lambda agent=agent: Connection(agent), sock=listener)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))
