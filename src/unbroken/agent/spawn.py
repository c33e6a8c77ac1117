"""The start of workers, each the leader of a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unbroken.errors import WorldError

from .environment import Program
from .lease import Lease

STDERR = 2
_CHANGEABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True)
class Child:
    """A process that was started."""

    pid: int
    stdout: int
    """Descriptor to read."""
    stderr: int


class NotStartedError(WorldError):
    """A program could not be started; `local_rank` says which."""

    def __init__(self, local_rank: int, message: str, children: list[Child]) -> None:
        super().__init__(message)
        self.local_rank = local_rank
        self.children = children
        """What runs or has ended, of all that were forked."""


def spawn_all(programs: Sequence[Program], lease: Lease) -> list[Child]:
    """Start them all; none outlives the lease's process.  NotStartedError.

    posix_spawn, which copies nothing of this process: a fork is several times slower, and takes
    the locks of other threads along.
    """
    _keep_to_itself()
    children: list[Child] = []
    try:
        for program in programs:
            children += [_spawn(program, lease)]
    except (OSError, ValueError) as error:
        local_rank = len(children)
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"cannot start {programs[local_rank].command[0]!r}: {reason}"
        raise NotStartedError(local_rank, text, children) from None
    return children


def _spawn(program: Program, lease: Lease) -> Child:
    with ExitStack() as ours, ExitStack() as theirs:
        stdout, to_stdout = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, stdout)
        theirs.callback(os.close, to_stdout)
        stderr, to_stderr = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, stderr)
        theirs.callback(os.close, to_stderr)
        lent = lease.lend()
        theirs.callback(os.close, lent)
        inherited = {1: to_stdout, 2: to_stderr, 3: lent, **program.lent}
        given = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in inherited.items()]
        pid = os.posix_spawnp(
            program.command[0],
            program.command,
            program.environment,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *given],
            setsid=True,
            setsigmask=(),
            setsigdef=_CHANGEABLE,
        )
        lease.bind(lent, pid)
        ours.pop_all()
    return Child(pid, stdout, stderr)


def _keep_to_itself() -> None:
    """Let no worker inherit what the agent itself was given, beyond the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        # The directory's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            if fd > STDERR and os.get_inheritable(fd):
                os.set_inheritable(fd, False)
