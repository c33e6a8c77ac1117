"""A real agent in its own process, and an operator that is connected to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.agent_requests import AgentRequests
from tests.watching import PATIENCE_SECONDS, Logs, until
from unbroken.agent_http.client import AgentLink, LinkResources
from unbroken.agent_http.identity import AgentIdentity
from unbroken.wire.agent import (
    AgentReport,
    AgentState,
    StartCommand,
    StopCommand,
    ToAgent,
)
from unbroken.wire.agent_codec import decode_report
from unbroken.wire.observation import CollectCommand, Evidence

MARK = "UNBROKEN_TEST_AGENT"
KEY = bytes(range(32))
UID = "uid-of-the-pod"


class Drain:
    """Reads a pipe to its end, so that its writer never blocks; None: there is no pipe."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._pipe = pipe
        self._seen = bytearray()
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._pipe or open(os.devnull, "rb") as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 20):
                with self._news:
                    self._seen += chunk
                    self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def wait_for(self, pattern: str) -> re.Match[bytes]:
        """Wait until the pattern has been written; fail if the writer ends without it."""
        expression = re.compile(pattern.encode())
        with self._news:
            self._news.wait_for(
                lambda: self._is_over or expression.search(self._seen), PATIENCE_SECONDS
            )
            found = expression.search(bytes(self._seen))
            assert found is not None, f"never written: {pattern}\n{self._seen.decode()}"
            return found

    def so_far(self) -> str:
        """Return what has been written until now."""
        with self._news:
            return self._seen.decode(errors="replace")

    def all(self) -> bytes:
        """Return everything that was written, once the writer has ended."""
        self._thread.join()
        return bytes(self._seen)


@dataclass
class Running:
    """An agent that listens."""

    process: subprocess.Popen[bytes]
    stdout: Drain
    stderr: Drain
    port: int
    mark: str
    log_dir: Path
    key: bytes | None = KEY

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Send one request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(AgentRequests("127.0.0.1", self.port, self.key)) as agent:
            return agent.request(method, path, data, headers or {})

    def status(self) -> dict[str, Any]:
        """Return the documented status."""
        code, body, _ = self.request("GET", "/status")
        assert code == 200
        found: dict[str, Any] = json.loads(body)
        return found

    def report(self) -> AgentReport:
        """Return the whole state."""
        return decode_report(self.request("GET", "/v1/report")[1])

    def wait(self) -> int:
        """Wait for the end of the agent; return its exit code."""
        return self.process.wait()

    def logs(self) -> str:
        """Return what the agent has written to stderr, and each worker to its files."""
        files = sorted(self.log_dir.rglob("*.log"))
        parts = [f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in files]
        return "\n".join([*parts, "stderr of the agent:", self.stderr.so_far()])

    def processes(self) -> list[int]:
        """Return all living processes that were started here, except the command itself."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def attempt_file(self, attempt: int, local_rank: int, name: str) -> Path:
        """Return the path of a worker's file."""
        (found,) = self.log_dir.glob(f"job_*/attempt_{attempt}/{local_rank}/{name}")
        return found


def marked(mark: str) -> list[int]:
    """Return living processes with the mark in their environment, whatever their parents are.

    The one that was started first comes first. The numbers do not tell: they begin again at 300.
    """
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if name.isdecimal() and f"{MARK}={mark}".encode() in _environment(name).split(b"\0"):
                ticks = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[19])
                found.append((ticks, int(name)))
    return [pid for _, pid in sorted(found)]


def _environment(pid: str) -> bytes:
    """Return the environment of a process, also of one that was started a moment ago.

    The call that starts a program returns before the kernel shows the program's environment."""
    read = b""
    for _ in range(1000):
        read = Path(f"/proc/{pid}/environ").read_bytes()
        if read:
            break
        os.readlink(
            f"/proc/{pid}/exe"
        )  # of threads of the kernel, and what has ended, there is none
    return read


@contextlib.contextmanager
def running(
    directory: Path,
    *arguments: str,
    nproc: int = 2,
    link: bool = True,
    stdout: int = subprocess.PIPE,
    wrapper: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    **environ: str,
) -> Iterator[Running]:
    """Start an agent; assert at the end that none of its processes lives."""
    mark = uuid.uuid4().hex
    key = directory / "key"
    key.write_text(KEY.hex() + "\n")
    logs = directory / "logs"
    base = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    if not link:
        environ = {"UNBROKEN_AGENT_AUTH": "none", **environ}
    auth = {} if "UNBROKEN_AGENT_AUTH" in environ else {"UNBROKEN_AGENT_KEY_FILE": str(key)}
    own = (
        *(sys.executable, "-m", "unbroken.agent"),
        *("--server-host", "127.0.0.1", "--server-port", "0", "--rdzv-id", "job"),
        *("--nproc-per-node", str(nproc), "--log_dir", str(logs)),
    )
    process = subprocess.Popen(
        [*wrapper, *(command or own), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=base
        | {
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            "AGENT_HOST": "127.0.0.1",
            "AGENT_PORT": "0",
            "UNBROKEN_POD_UID": UID,
            "UNBROKEN_RESOURCE_CONFIG_DIR": str(directory / "config"),
            "UNBROKEN_AGENT_LINK": "on" if link else "off",
        }
        | auth
        | environ,
    )
    assert process.stderr is not None
    console, stderr = Drain(process.stdout), Drain(process.stderr)
    try:
        port = int(stderr.wait_for(r"waits for an operator at http://\S+:(\d+) ")[1])
        yield Running(process, console, stderr, port, mark, logs, None if not auth else KEY)
    finally:
        process.terminate()
        process.wait()
    assert marked(mark) == []


@dataclass
class Operator:
    """Messages that one operator has received, in order."""

    reports: list[AgentReport] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    evidence: list[Evidence] = field(default_factory=list)
    send: Callable[[ToAgent], None] = lambda command: None
    logs: Logs = None
    """Shown when a wait gives up."""

    def on_report(self, report: AgentReport) -> None:
        self.reports.append(report)
        self.news.set()

    def on_lost(self, why: str) -> None:
        self.losses.append(why)
        self.news.set()

    def on_evidence(self, evidence: Evidence) -> None:
        self.evidence.append(evidence)
        self.news.set()

    async def examine(
        self, attempt: int = 0, seconds: float = 20.0, samples_per_second: int = 0
    ) -> Evidence:
        """Ask for the activity of the ranks, and wait for the answer."""
        request = len(self.evidence) + 1
        self.send(CollectCommand(request, attempt, seconds, samples_per_second))
        await self.until(lambda: any(one.request == request for one in self.evidence))
        return self.evidence[-1]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for messages until `holds()`."""
        await until(
            lambda: (self.losses, self.evidence[-1:], self.reports[-1:]),
            lambda _: holds(),
            news=self.news,
            logs=self.logs,
        )

    async def more(self, count: int) -> None:
        """Wait until `count` more reports have arrived."""
        wanted = len(self.reports) + count
        await self.until(lambda: len(self.reports) >= wanted)

    async def report(self, holds: Callable[[AgentReport], bool]) -> AgentReport:
        """Wait for a newest report that fits."""
        await self.until(lambda: bool(self.reports) and holds(self.reports[-1]))
        return self.reports[-1]

    async def state(self, state: AgentState, attempt: int | None = None) -> AgentReport:
        """Wait for a state of the agent, in any attempt or in one."""
        return await self.report(
            lambda r: r.state is state and (attempt is None or r.attempt == attempt)
        )

    async def workers(self, attempt: int) -> AgentReport:
        """Wait until every worker of the attempt has written something."""
        return await self.report(
            lambda r: (
                r.attempt == attempt
                and len(r.workers) == r.nproc
                and all(worker.first_output_at for worker in r.workers)
            )
        )


@contextlib.asynccontextmanager
async def linked(
    agent: Running | int,
    key: bytes | None = KEY,
    uid: str | None = UID,
    shared: LinkResources | None = None,
    **identity: Any,
) -> AsyncIterator[Operator]:
    """Connect an operator to an agent, or to any program that listens on a port."""
    port = agent if isinstance(agent, int) else agent.port
    if isinstance(agent, Running):
        key = agent.key
    operator = Operator(logs=agent.logs if isinstance(agent, Running) else None)
    link = AgentLink(
        "127.0.0.1", port, key and AgentIdentity(key, uid, **identity),
        operator.on_report, operator.on_lost, on_evidence=operator.on_evidence, shared=shared,
    )  # fmt: skip
    operator.send = link.send
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(link.run())
        try:
            yield operator
        finally:
            task.cancel()


def start(attempt: int = 0, **changes: Any) -> StartCommand:
    """Return the start of a job's only node."""
    keys: dict[str, Any] = {
        "attempt": attempt,
        "rank": 0,
        "nnodes": 1,
        "master_addr": "127.0.0.1",
        "master_port": 29400 + attempt,
    }
    return StartCommand(**(keys | changes))


def stop(attempt: int = 0, **changes: Any) -> StopCommand:
    """Return the stop of an attempt."""
    return StopCommand(attempt, **changes)


def program(directory: Path, text: str, name: str = "train.py") -> str:
    """Write a script; return its path."""
    path = directory / name
    path.write_text(text)
    return str(path)


# One write: what print() says leaves an unbuffered Python in pieces, and the first piece counts.
SLEEPER = """
import os, signal
os.write(1, f"up {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
signal.pause()
"""
