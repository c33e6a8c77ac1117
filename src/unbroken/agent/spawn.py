"""Fork and exec of workers, each the leader of a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from unbroken.errors import WorldError

from . import lineage
from .environment import Program


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


def spawn_all(programs: Sequence[Program]) -> list[Child]:
    """Start them all, then wait until each has become its program.  NotStartedError."""
    errors, report = os.pipe2(os.O_CLOEXEC)
    children: list[Child] = []
    failed = ""
    try:
        for program in programs:
            children += [_spawn(program, report)]
    except OSError as error:
        failed = f"{len(children)}:cannot start another process: {error.strerror}"
    finally:
        os.close(report)
    with open(errors, "rb") as file:
        # The end of the pipe comes when the last of them has closed it by becoming its program.
        failed = failed or file.read(4096).decode(errors="replace").partition("\n")[0]
    if failed:
        local_rank, _, message = failed.partition(":")
        raise NotStartedError(int(local_rank), message, children)
    return children


def _spawn(program: Program, report: int) -> Child:
    stdout, to_stdout = os.pipe2(os.O_CLOEXEC)
    stderr, to_stderr = os.pipe2(os.O_CLOEXEC)
    agent = os.getpid()
    # No handler of ours may run in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, agent, (to_stdout, to_stderr, report))
    except OSError:
        os.close(stdout)
        os.close(stderr)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(to_stdout)
        os.close(to_stderr)
    return Child(pid, stdout, stderr)


def _become(program: Program, agent: int, descriptors: tuple[int, int, int]) -> NoReturn:
    """In the child: become the program, or say why not and end."""
    stdout, stderr, report = descriptors
    try:
        os.setsid()
        lineage.die_with_parent()
        if os.getppid() != agent:
            os._exit(1)  # It died before it could take this along.
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, stdout, stderr)):
            os.dup2(fd, number)
        report = _keep_only(report)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            # Signals of the C library itself refuse.
            with contextlib.suppress(OSError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(program.command[0], program.command, program.environment)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = f"{program.local_rank}:cannot start {program.command[0]!r}: {reason}\n"
        os.write(report, text.encode())
    finally:
        os._exit(127)


def _keep_only(report: int) -> int:
    """Close everything but the standard streams and the report, also what we were given."""
    kept = os.dup2(report, 3, inheritable=False) if report != 3 else report
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return kept
