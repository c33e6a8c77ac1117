"""A command of the user's: for any cloud, for a BMC, for everything that can be called.

Its environment has NODE, ACTION (`reset-gpu`, `reboot`, `replace`), PROVIDER_ID (the Node's
`spec.providerID` when it joined), BOOT_ID and ORDER_ID. So have its arguments where they say
`{node}`, `{action}` and so on. None of them holds a space or a sign that a shell knows (`PLAIN`).
Its exit status is the answer. 0: done. 75: still at it (EX_TEMPFAIL of sysexits.h), so it is called
again. Anything else: failed, for the reason on the last line of its standard error. It may be
called again with the same ORDER_ID, after a restart of the operator too, and must then not do it
twice. A last line `replacement=NAME` on standard output names the node that takes the place.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unbroken.core.nodes.repair.events import ALL_ACTIONS, Answer, OrderStatus, RepairOrder
from unbroken.errors import SpecError
from unbroken.foreign_numbers import SHOWN_CHARACTERS
from unbroken.kube.client import KubeClient, Object
from unbroken.spec.nodes.values import Action

from .base import machine_of, namesake, node_boot, stale

STILL_WORKING = 75
LIMIT_SECONDS = 300.0
"""A call that takes longer is killed, with all that it has started; it may answer 75 instead."""
OUTPUT_BYTES = 65536
KILL_AGAIN_SECONDS = 0.2
"""Seconds from one search for what a command has left behind to the next."""
PASSES_MAX = 100
"""Through the processes; one that the kernel holds in a system call outlives SIGKILL."""
TEXT_MAX = 300
REPLACEMENT = "replacement="
NAMES = ("node", "action", "provider_id", "boot_id", "order_id")
PLAIN = re.compile(r"(?:(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9:/._@+=,%-]{0,1000})?")
"""Values that a command is given, of which none leads out of a folder.  Provider and boot IDs are
what a kubelet says, and a word of the command may be a shell's script: other values could be code,
options, paths elsewhere, or no words at all."""
MARK = "UNBROKEN_REPAIR_CALL"
"""Variable of all that a call starts, by which it is found however it has left."""


def parse_command(text: str) -> tuple[str, ...]:
    """The words of a command; SpecError for one that cannot be called."""
    try:
        words = shlex.split(text)
        for word in words:
            word.format(**dict.fromkeys(NAMES, ""))
    except (ValueError, KeyError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in NAMES)
        raise SpecError(f"--node-command: {error}; it may use {known}") from error
    if not words:
        raise SpecError("--node-command: say which command resets, reboots and replaces nodes")
    return tuple(words)


class CommandProvider:
    """Calls a command for each order, until it has an answer."""

    name = "command"
    supports = ALL_ACTIONS

    def __init__(
        self, client: KubeClient, words: Sequence[str], limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        self._client = client
        self._words = tuple(words)
        self._limit_seconds = limit_seconds

    async def status(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.status`."""
        return await self._call(order, await self._node(order))

    async def order(self, order: RepairOrder) -> OrderStatus:
        """As `Provider.order`."""
        over = stale(order, await node_boot(self._client, order.node))
        if over is not None and order.action is Action.REBOOT:
            return over
        node = await self._node(order)
        machine = "" if node is None else _named(node)
        if machine and (other := await namesake(self._client, order.node, machine, _named)):
            text = f"nodes {order.node} and {other} both say that they are {machine}"
            return OrderStatus(Answer.UNSUPPORTED, text[:TEXT_MAX])
        return await self._call(order, node)

    async def _node(self, order: RepairOrder) -> Object | None:
        return await self._client.get_or_none(f"api/v1/nodes/{quote(order.node)}", Object)

    async def _call(self, order: RepairOrder, node: Object | None) -> OrderStatus:
        provider_id = await machine_of(self._client, order.node, node)
        if isinstance(provider_id, OrderStatus):
            return provider_id
        values = (order.node, order.action.value, provider_id, order.boot_id, order.id)
        told = dict(zip(NAMES, values, strict=True))
        for name, value in told.items():
            if not PLAIN.fullmatch(value):
                text = (
                    f"{name} of node {order.node} is {value[:SHOWN_CHARACTERS]!r}: a command is "
                    "given letters, digits and :/._@+=,%- only, beginning with a letter or digit, "
                    "and without .."
                )
                return OrderStatus(Answer.FAILED, text)
        words = [word.format(**told) for word in self._words]
        given = {name.upper(): value for name, value in told.items()}
        mark = f"{os.getpid()}-{order.id}"
        self._client.require_leave()
        return await self._run(words, {**os.environ, **given, MARK: mark}, mark)

    async def _run(self, words: list[str], given: Mapping[str, str], mark: str) -> OrderStatus:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=given,
            )
        except OSError as error:
            return OrderStatus(Answer.FAILED, f"{words[0]} cannot be started: {error.strerror}")
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.TaskGroup() as tasks:
            out = tasks.create_task(_tail(process.stdout))
            err = tasks.create_task(_tail(process.stderr))
            try:
                is_late = await _is_late(process, self._limit_seconds)
            finally:
                # Whatever it left behind would act on a node that may be another by then, and
                # hold its output open.
                await _end_all(mark, {tasks.create_task(process.wait()), out, err})
        if is_late:
            text = f"{words[0]} has not ended within {self._limit_seconds:.0f} s and was killed"
            return OrderStatus(Answer.FAILED, text)
        code = process.returncode or 0
        return _answer(words[0], code, _last_line(out.result()), _last_line(err.result()))


def _named(node: Object) -> str:
    """Return the machine that a node names, without the scheme and the places around it."""
    return str((node.get("spec") or {}).get("providerID") or "").rstrip("/").rpartition("/")[2]


async def _end_all(mark: str, output: set[asyncio.Task[Any]]) -> None:
    """Kill what carries the mark until `output`, which reads what it writes, has come to its end.

    Once is not enough: while a process turns into another program, /proc shows no environment.
    """
    while output:
        await asyncio.to_thread(_kill_marked, mark)
        _, output = await asyncio.wait(output, timeout=KILL_AGAIN_SECONDS)


async def _is_late(process: asyncio.subprocess.Process, limit_seconds: float) -> bool:
    """True if the process itself has not ended in time.

    Not by `process.wait`, which continues until all processes that hold its output have closed it.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False  # it was reaped already
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(limit_seconds):
            await ended.wait()
    except TimeoutError:
        return True
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return False


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The end of what is written, until all who may write are gone."""
    kept = b""
    while chunk := await stream.read(OUTPUT_BYTES):
        kept = (kept + chunk)[-OUTPUT_BYTES:]
    return kept


def _answer(command: str, code: int, out: str, err: str) -> OrderStatus:
    if code == 0:
        is_named = out.startswith(REPLACEMENT)
        return OrderStatus(
            Answer.DONE, replacement=out.removeprefix(REPLACEMENT) if is_named else ""
        )
    if code == STILL_WORKING:
        return OrderStatus(Answer.WORKING, err or out)
    return OrderStatus(Answer.FAILED, err or f"{command} ended with exit code {code}")


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:TEXT_MAX] if lines else ""


def _kill_marked(mark: str) -> None:
    """Kill every process that carries the mark, and what they start meanwhile.  Blocks."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(PASSES_MAX):
        if not sum(_kill_if(folder, wanted) for folder in Path("/proc").glob("[0-9]*")):
            return


def _kill_if(folder: Path, wanted: bytes) -> bool:
    """Kill the process of a folder of /proc if it carries the mark and lives."""
    try:
        handle = os.pidfd_open(int(folder.name))
    except OSError:
        return False
    try:
        # Looked at after the handle was had: its number cannot change hands.  Those that have
        # ended show no environment.
        if wanted not in (folder / "environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False  # it has ended, or is not ours to look at
    finally:
        os.close(handle)
    return True
