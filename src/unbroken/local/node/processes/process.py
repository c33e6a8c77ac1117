"""Containers as processes, from the runner's side: start, find again, signal, notice the end.

Every container has a directory of its own per run. In it this module writes `run.json` (the
supervisor's identity) before the program may start, and the supervisor writes `main.json`,
`exit.json` and `log`. A restarted runner finds its containers by these files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import WorldError
from unbroken.local.node.pods.events import Exit

from .isolation import Isolation
from .supervisor import SIGKILL_ALL, START_ERROR, start_ticks, write_json

ANSWER_SECONDS = 20.0
"""Seconds that the launcher and a new supervisor may take to answer on a loaded machine."""
MARKER = "UNBROKEN_CONTAINER_ID"
"""Environment variable that distinguishes every process of a container from all others."""
_SOURCE = str(Path(__file__).resolve().parents[4])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    "from unbroken.local.node.processes.launcher import main; main()"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a container that has a supervisor."""

    directory: Path
    supervisor: int
    pidfd: int
    """Pidfd of the supervisor; readable when nothing of the container lives."""
    main: int
    """Process number of the program; valid until the supervisor's end only."""
    started_at: float
    details: Mapping[str, Any]
    """Facts that the runner recorded when it started it."""

    def signal(self, number: int) -> None:
        """Give the supervisor an order: SIGTERM or, for everything's end, SIGUSR1."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            # It has ended, which its pidfd shows as well.
            return

    async def ended(self) -> Exit:
        """Wait until nothing of the container lives."""
        await readable(self.pidfd)
        result = read_exit(self.directory)
        return await asyncio.to_thread(self._sweep) if result is None else result

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.pidfd)

    def _sweep(self) -> Exit:
        """After a supervisor that was killed: end what it could not."""
        kill_marked(self.details[MARKER])
        return unknown_exit(self.directory, self.started_at)


def unknown_exit(directory: Path, started_at: float) -> Exit:
    """Record an end that was not seen (kubelet reports the same after lost containers)."""
    result = Exit(
        exit_code=137,
        reason="ContainerStatusUnknown",
        message="The supervisor of the container was killed",
        started_at=started_at,
        finished_at=directory.stat().st_mtime,
    )
    write_json(
        str(directory / "exit.json"),
        {name: getattr(result, name) for name in Exit.__slots__},
    )
    return result


async def readable(fd: int) -> None:
    """Wait until a descriptor is readable."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return result


def read_exit(directory: Path) -> Exit | None:
    """Return how the run in this directory ended; None while it runs."""
    result = _read_json(directory / "exit.json")
    return None if result is None else Exit(**result)


def read_details(directory: Path) -> dict[str, Any] | None:
    """Return the facts recorded when the run was started; None: its program never started."""
    return _read_json(directory / "run.json")


def adopt(directory: Path) -> Run | Exit | None:
    """Find a run again: alive, ended, or (None) never begun."""
    details = read_details(directory)
    if details is None:
        return None
    pidfd = _open_supervisor(details["supervisor"], details["ticks"])
    ended = read_exit(directory)
    if ended is not None:
        if pidfd is not None:
            os.close(pidfd)
        return ended
    main = _read_json(directory / "main.json") or {"main": 0, "started_at": details["at"]}
    if pidfd is None:
        kill_marked(details[MARKER])
        return read_exit(directory) or unknown_exit(directory, main["started_at"])
    return Run(directory, details["supervisor"], pidfd, main["main"], main["started_at"], details)


def _open_supervisor(pid: int, ticks: int) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # The number was checked after the descriptor was had, so it cannot change hands in between.
    if start_ticks(pid) == ticks:
        return pidfd
    os.close(pidfd)
    return None


def marked(container_id: str) -> list[int]:
    """Return the processes that carry the mark of a container, whatever their parents are."""
    mark = f"{MARKER}={container_id}".encode()
    result = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark in environment.split(b"\0"):
            result.append(int(name))
    return result


def kill_marked(container_id: str) -> None:
    """Kill whatever carries the mark, until nothing does."""
    while pids := marked(container_id):
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            with os.fdopen(fd, "rb", buffering=0):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                # Wait for the end, so that the next look finds only those born meanwhile.
                select_readable(fd)


def select_readable(fd: int) -> None:
    """Block until a descriptor is readable (for use outside the event loop)."""
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(ANSWER_SECONDS * 1000)


class Command:
    """A command that runs inside a container."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    async def ended(self) -> int:
        """Return its exit code. Raises WorldError if it could not be started or was killed with its
        container."""
        loop = asyncio.get_running_loop()
        answer = await loop.sock_recv(self._control, 8192)
        if not answer:
            raise WorldError("the container ended while the command ran")
        decoded = json.loads(answer)
        if "error" in decoded:
            raise WorldError(decoded["error"])
        return int(decoded["exit_code"])

    def close(self) -> None:
        """Let go; a command that still runs is killed."""
        self._control.close()


class Launcher:
    """Starts supervisors through the launcher process, which it starts, and again if it dies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self.isolation = Isolation.NONE
        """The isolation that this host allows; known once started."""

    async def start(self) -> None:
        """Start the launcher process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._directory.mkdir(parents=True, exist_ok=True)
        arguments = ["-I", "-S", "-c", _PROGRAM, _SOURCE, str(theirs.fileno())]
        with theirs, open(self._directory / "launcher.log", "ab") as log:  # noqa: ASYNC230
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await loop.sock_recv(ours, 64)
        if not answer:
            raise WorldError("the launcher of containers does not start; see launcher.log")
        self.isolation = Isolation(answer.decode())
        self._socket = ours

    async def close(self) -> None:
        """End the launcher; containers continue."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            await self._process.wait()

    async def run(
        self, request: Mapping[str, Any], details: Mapping[str, Any], now: float
    ) -> Run | Exit:
        """Start a container; `details` are kept with it and must hold its mark."""
        directory = Path(request["directory"])
        with await self._send(b"container", request, ()) as report:
            hello = await _answer(report)
            if not hello:
                raise WorldError("the supervisor of the container died; see launcher.log")
            known = {**details, "supervisor": hello["pid"], "ticks": hello["ticks"], "at": now}
            pidfd = os.pidfd_open(hello["pid"])
            write_json(str(directory / "run.json"), known)
            report.send(b"g")
            try:
                started = await _answer(report)
            except TimeoutError:
                # Whether the program runs is not known, and nothing would watch it.
                signal.pidfd_send_signal(pidfd, SIGKILL_ALL)
                started = {}
        if not started:
            await readable(pidfd)
            os.close(pidfd)
            result = read_exit(directory)
            return result or Exit(START_ERROR, "StartError", "its supervisor died", now, now)
        return Run(directory, hello["pid"], pidfd, started["main"], started["started_at"], known)

    async def command(self, request: Mapping[str, Any], streams: Sequence[int]) -> Command:
        """Run a command in a container (`join`: its program); `streams`: its 0, 1, 2."""
        return Command(await self._send(b"exec", request, streams))

    async def _send(
        self, kind: bytes, request: Mapping[str, Any], streams: Sequence[int]
    ) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            await self._send_descriptors(kind, [body, theirs.fileno(), *streams])
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(body)
            theirs.close()
        return ours

    async def _send_descriptors(self, kind: bytes, fds: list[int]) -> None:
        while True:
            async with self._starting:
                if self._socket is None:
                    await self.start()
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [kind], fds)
            except BlockingIOError:
                await _writable(self._socket.fileno())
            except (BrokenPipeError, ConnectionResetError):
                await self.close()
            else:
                return


async def _answer(report: socket.socket) -> dict[str, Any]:
    """Return a supervisor's next message; empty when it has gone. Raises TimeoutError."""
    async with asyncio.timeout(ANSWER_SECONDS):
        received = await asyncio.get_running_loop().sock_recv(report, 4096)
    decoded: dict[str, Any] = json.loads(received or b"{}")
    return decoded


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_writer(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_writer(fd)
