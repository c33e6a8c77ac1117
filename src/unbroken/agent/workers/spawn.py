"""The start of workers, each the leader of a session of its own, with a pipe that ends it with the
agent.

The agent has the only writing end of the pipe. Each worker inherits a reading end, open for this
purpose alone. When the writing end goes, however the agent ended, the kernel kills the worker's
process group.

Unlike the parent-death signal, it needs no code in the worker before it becomes its program, so
that workers need not be forked. It also ends what the worker has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from unbroken.errors import WorldError

from .environment import Program

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)  # linux/fcntl.h; Python has it since 3.14


class LifePipe:
    """Lasts as long as this object's process."""

    def __init__(self) -> None:
        self._source, self._held = os.pipe2(os.O_CLOEXEC)

    def lend(self) -> int:
        """Return a descriptor for one worker to inherit; the caller closes it here after `bind`."""
        # Opened again, because owner and signal belong to the open file.
        return os.open(f"/proc/self/fd/{self._source}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def bind(self, lent: int, group: int) -> None:
        """Let the end of the agent kill the process group, as long as any process of it holds
        `lent`."""
        fcntl.fcntl(lent, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lent, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lent, fcntl.F_SETFL, fcntl.fcntl(lent, fcntl.F_GETFL) | os.O_ASYNC)


STDERR = 2
_CHANGEABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True)
class Child:
    """A process that was started."""

    pid: int
    stdout: int
    """Descriptor to read."""
    stderr: int
    is_warm: bool = False


class WarmSource(Protocol):
    """Has parked workers, and learns the imports of workers that start cold."""

    def hand(
        self, program: Program, inherited: Mapping[int, int], bind: Callable[[int], None]
    ) -> int | None:
        """Let a parked worker become the program; return its pid. None: it has to be started
        cold."""

    def learning(self, program: Program) -> Program:
        """Return the program for a cold start."""


class NotStartedError(WorldError):
    """A program could not be started; `local_rank` is its rank."""

    def __init__(self, local_rank: int, message: str, children: list[Child]) -> None:
        super().__init__(message)
        self.local_rank = local_rank
        self.children = children
        """Forked processes, running or ended."""


def spawn_all(
    programs: Sequence[Program], lease: LifePipe, warm: WarmSource | None = None
) -> list[Child]:
    """Start all programs; none outlives the lease's process. Raises NotStartedError.

    It uses posix_spawn, which copies nothing of this process. A fork is several times slower, and
    takes along the locks of other threads.
    """
    _keep_to_itself()
    children: list[Child] = []
    try:
        for program in programs:
            children += [_spawn(program, lease, warm)]
    except (OSError, ValueError) as error:
        local_rank = len(children)
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"cannot start {programs[local_rank].command[0]!r}: {reason}"
        raise NotStartedError(local_rank, text, children) from None
    return children


def _spawn(program: Program, lease: LifePipe, warm: WarmSource | None) -> Child:
    with ExitStack() as ours, ExitStack() as theirs:
        stdout, to_stdout = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, stdout)
        theirs.callback(os.close, to_stdout)
        stderr, to_stderr = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, stderr)
        theirs.callback(os.close, to_stderr)
        lent = lease.lend()
        theirs.callback(os.close, lent)
        inherited = {0: 0, 1: to_stdout, 2: to_stderr, 3: lent, **program.lent}
        bind = partial(lease.bind, lent)
        pid = warm.hand(program, inherited, bind) if warm is not None else None
        is_warm = pid is not None
        if pid is None:
            cold = warm.learning(program) if warm is not None else program
            pid = posix_spawn(cold.command, cold.environment, {**inherited, **cold.lent})
            bind(pid)
        ours.pop_all()
    return Child(pid, stdout, stderr, is_warm)


def posix_spawn(
    command: tuple[str, ...], environment: Mapping[str, str], inherited: Mapping[int, int]
) -> int:
    """Start one process with the descriptors named (there, here), set in order. Raises OSError.

    Descriptor 0 is /dev/null unless it is named.
    """
    given: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in inherited.items()
    ]
    if 0 not in inherited:
        given.insert(0, (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    return os.posix_spawnp(
        command[0],
        command,
        environment,
        file_actions=given,
        setsid=True,
        setsigmask=(),
        setsigdef=_CHANGEABLE,
    )


def _keep_to_itself() -> None:
    """Keep descriptors that the agent itself was given, beyond the standard streams, from the
    workers."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        # The directory's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            if fd > STDERR and os.get_inheritable(fd):
                os.set_inheritable(fd, False)
