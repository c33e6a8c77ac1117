"""A command inside a container over a WebSocket (Kubernetes remotecommand v4 and v5).

Every message starts with its channel: 0 stdin, 1 stdout, 2 stderr, 3 error (a Status at the end), 4
resize. Version v5 adds 255, which closes the channel named by its next byte (apimachinery v1.33,
remotecommand/constants.go).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import WSMsgType, web

from unbroken.errors import WorldError
from unbroken.local.node.pods.commands import Target, exec_request
from unbroken.local.node.pods.events import Object

from .process import Command, Launcher

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR = range(4)
CHUNK = 32 * 1024
DRAIN_SECONDS = 0.2
"""Seconds for output that is still on its way when the command has ended but left a process behind
that holds its output open."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The client's request."""

    argv: Sequence[str]
    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool


@dataclass(slots=True)
class Ends:
    """Our ends of the command's streams, and the command's own."""

    theirs: list[int]
    outputs: dict[int, int]
    """Channel -> descriptor to read."""
    input: int | None
    terminal: int | None = None

    def close_theirs(self) -> None:
        """Close the descriptors that have been passed on."""
        for fd in set(self.theirs):
            os.close(fd)

    def close(self) -> None:
        """Close what is still open on our side."""
        own = {*self.outputs.values(), self.input, self.terminal} - {None}
        for fd in own:
            assert fd is not None
            os.close(fd)
        self.outputs.clear()
        self.input = self.terminal = None


def open_ends(wanted: Wanted) -> Ends:
    """Make the streams of a command."""
    if wanted.tty:
        master, slave = pty.openpty()
        os.set_blocking(master, False)
        return Ends([slave, slave, slave], {STDOUT: master}, master, master)
    theirs: list[int] = []
    outputs: dict[int, int] = {}
    given: int | None = None
    if wanted.stdin:
        read, given = os.pipe()
        os.set_blocking(given, False)
        theirs.append(read)
    else:
        theirs.append(os.open(os.devnull, os.O_RDONLY))
    for channel, is_wanted in ((STDOUT, wanted.stdout), (STDERR, wanted.stderr)):
        if is_wanted:
            outputs[channel], write = os.pipe()
            os.set_blocking(outputs[channel], False)
            theirs.append(write)
        else:
            theirs.append(os.open(os.devnull, os.O_WRONLY))
    return Ends(theirs, outputs, given)


class ExecSession:
    """One command over one WebSocket."""

    def __init__(self, launcher: Launcher, target: Target, wanted: Wanted) -> None:
        self._launcher = launcher
        self._target = target
        self._wanted = wanted
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)

    async def run(self, socket: web.WebSocketResponse) -> None:
        """Run the command; ends with the command or with the connection, whichever is first."""
        ends = open_ends(self._wanted)
        try:
            try:
                request = exec_request(self._target, self._wanted.argv, tty=self._wanted.tty)
                command = await self._launcher.command(request, ends.theirs)
            finally:
                ends.close_theirs()
            try:
                await self._converse(socket, command, ends)
            finally:
                command.close()
        finally:
            ends.close()
        await socket.close()

    async def _converse(self, socket: web.WebSocketResponse, command: Command, ends: Ends) -> None:
        async with asyncio.TaskGroup() as tasks:
            incoming = tasks.create_task(self._receive(socket, ends))
            feeding = tasks.create_task(self._feed(ends))
            sending = [
                tasks.create_task(_send_output(socket, channel, fd))
                for channel, fd in ends.outputs.items()
            ]
            outcome = tasks.create_task(_outcome(command))
            await asyncio.wait([incoming, outcome], return_when=asyncio.FIRST_COMPLETED)
            if outcome.done():
                await _finished(sending)
                if not socket.closed:
                    status = json.dumps(outcome.result()).encode()
                    with contextlib.suppress(ConnectionError):
                        await socket.send_bytes(bytes([ERROR]) + status)
            for task in (incoming, feeding, outcome, *sending):
                task.cancel()

    async def _receive(self, socket: web.WebSocketResponse, ends: Ends) -> None:
        """Sort what the client sends; ends when the client is gone."""
        async for message in socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT) or not message.data:
                continue
            data = message.data if message.type is WSMsgType.BINARY else message.data.encode()
            match data[0]:
                case 0:
                    await self._input.put(data[1:])
                case 4 if ends.terminal is not None:
                    _resize(ends.terminal, data[1:])
                case 255 if data[1:] == bytes([STDIN]):
                    await self._input.put(None)

    async def _feed(self, ends: Ends) -> None:
        """Write the client's input to the command as it takes it."""
        while (data := await self._input.get()) is not None:
            if ends.input is None:
                continue
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(ends.input, view) :]
                except BlockingIOError:
                    await _ready_to_write(ends.input)
                except OSError:
                    # The command does not read any more; what is meant for it is dropped.
                    break
        if ends.input is not None and ends.terminal is None:
            os.close(ends.input)
            ends.input = None


async def _finished(sending: Sequence[asyncio.Task[None]]) -> None:
    """Wait for output to come to its end, not longer than it takes."""
    if sending:
        await asyncio.wait(sending, timeout=DRAIN_SECONDS)


async def _outcome(command: Command) -> Object:
    """The Status at the end of a command (kubelet v1.33, cri-streaming remotecommand/exec.go)."""
    try:
        code = await command.ended()
    except WorldError as error:
        text = f"error executing command in container: {error}"
        return {
            "metadata": {},
            "status": "Failure",
            "reason": "InternalError",
            "message": text,
            "details": {"causes": [{"message": text}]},
            "code": 500,
        }
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _send_output(socket: web.WebSocketResponse, channel: int, fd: int) -> None:
    while True:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            await _ready_to_read(fd)
            continue
        except OSError:
            # A terminal whose other side has been closed.
            return
        if not data:
            return
        try:
            await socket.send_bytes(bytes([channel]) + data)
        except ConnectionError:
            return


async def _ready_to_read(fd: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


async def _ready_to_write(fd: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_writer(fd)


def _resize(terminal: int, data: bytes) -> None:
    try:
        size = json.loads(data)
        packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        # A size that cannot be read changes nothing.
        return
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
