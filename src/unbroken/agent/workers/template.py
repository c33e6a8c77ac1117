"""The agent's end of a template process: its messages, its output, and its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unbroken.wire.warm import MESSAGE_BYTES_MAX

from . import lineage
from .environment import BOOT, Program, python
from .spawn import LifePipe, posix_spawn

LOWEST = 64
"""Lowest number of our descriptors: the start of a worker overwrites lower ones."""
NAME_CHARACTERS = 300
WORD_CHARACTERS = 200
_PAIR = 4
"""Descriptor in the template."""


class TemplateProcess:
    """The template process; messages to it wait until it reads."""

    @classmethod
    def start(
        cls, program: Program, environment: Mapping[str, str], lease: LifePipe
    ) -> TemplateProcess:
        """Start a template for the program; it ends with the lease. Raises OSError."""
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(theirs)
            output = os.memfd_create("unbroken-template", os.MFD_CLOEXEC)
            lent = lease.lend()
            stack.callback(os.close, lent)
            given = {_PAIR: theirs.fileno(), 3: lent, 1: output, 2: output}
            raised = {}
            for number, fd in given.items():
                raised[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
                stack.callback(os.close, raised[number])
            words = ("template", str(_PAIR), program.kind, *program.arguments)
            pid = posix_spawn((python(), "-u", BOOT, *words), environment, raised)
            lease.bind(lent, pid)
        ours.setblocking(False)
        return cls(pid, ours, output)

    def __init__(self, pid: int, pair: socket.socket, output: int) -> None:
        self.pid = pid
        self.pair = pair
        self.output = output
        """A file in memory with all of its output."""
        self._unsent: collections.deque[tuple[bytes, list[socket.socket]]] = collections.deque()

    def send(self, message: Mapping[str, Any], *beside: socket.socket) -> None:
        """Send messages in order; a message that can no longer be sent shows as the end of its
        pair."""
        self._unsent.append((json.dumps(message).encode(), list(beside)))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            data, beside = self._unsent[0]
            try:
                socket.send_fds(self.pair, [data], [one.fileno() for one in beside])
            except BlockingIOError:
                loop.add_writer(self.pair, self._flush)
                return
            except OSError:
                self._unsent.clear()
                break
            for one in beside:
                one.close()
            self._unsent.popleft()
        loop.remove_writer(self.pair)

    def teach(
        self, names: Sequence[str], is_given: bool, left_out: Mapping[str, str] | None = None
    ) -> None:
        """Have it import modules, but not those in `left_out`; if given by the job (`is_given`),
        any module is allowed."""
        for message in _imports(names, is_given, [*(left_out or {}).items()]):
            self.send(message)

    def pause(self) -> None:
        """Pause it until `resume`."""
        lineage.kill_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        lineage.kill_group(self.pid, signal.SIGCONT)

    def last_words(self) -> str:
        """Return the last line that it wrote."""
        size = os.fstat(self.output).st_size
        text = os.pread(self.output, 4096, max(0, size - 4096)).decode(errors="replace")
        return (text.strip().splitlines() or [""])[-1][:WORD_CHARACTERS]

    def end(self) -> None:
        """Kill it; the owner of the agent's children reaps it."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self.pair)
        loop.remove_reader(self.pair)
        lineage.kill_group(self.pid)
        self.pair.close()
        os.close(self.output)


def _imports(
    names: Sequence[str], is_given: bool, left_out: Sequence[tuple[str, str]]
) -> Iterator[Mapping[str, Any]]:
    """Return messages with the names, none too long."""
    most = MESSAGE_BYTES_MAX // (6 * (2 * NAME_CHARACTERS + WORD_CHARACTERS))
    starts = range(0, max(1, len(names), len(left_out)), most)
    for start in starts:
        yield {
            "type": "import",
            "modules": list(names[start : start + most]),
            "is_given": is_given,
            "left_out": dict(left_out[start : start + most]),
            **({"more": True} if start != starts[-1] else {}),
        }
