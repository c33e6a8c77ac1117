"""Fork and exec of workers, each the leader of a session of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
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
    """Start them all, then wait until each has become its program.  NotStartedError.

    As little as can be is done between the forks and in the children: every page that either side
    touches is copied, and the attempt starts with the last of them.
    """
    errors, report = os.pipe2(os.O_CLOEXEC)
    children: list[Child] = []
    failed = ""
    every = signal.valid_signals()
    origin = _Origin(os.getpid(), report, _changed(every))
    # No handler of ours may run in a child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    try:
        for program in programs:
            children += [_spawn(program, origin)]
    except OSError as error:
        failed = f"{len(children)}:cannot start another process: {error.strerror}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(report)
    with open(errors, "rb") as file:
        # The end of the pipe comes when the last of them has closed it by becoming its program.
        failed = failed or file.read(4096).decode(errors="replace").partition("\n")[0]
    if failed:
        local_rank, _, message = failed.partition(":")
        raise NotStartedError(int(local_rank), message, children)
    return children


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a child needs to know of its agent."""

    agent: int
    report: int
    """Descriptor for what goes wrong."""
    changed: tuple[int, ...]
    """Signals whose default action is not in force."""


def _changed(signals: Iterable[int]) -> tuple[int, ...]:
    # What Python knows no handler of is told as None: a handler of C, or a signal of the C library.
    return tuple(n for n in signals if signal.getsignal(n) not in (signal.SIG_DFL, None))


def _spawn(program: Program, origin: _Origin) -> Child:
    stdout, to_stdout = os.pipe2(os.O_CLOEXEC)
    stderr, to_stderr = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, origin, to_stdout, to_stderr)
    except OSError:
        os.close(stdout)
        os.close(stderr)
        raise
    finally:
        os.close(to_stdout)
        os.close(to_stderr)
    return Child(pid, stdout, stderr)


def _become(program: Program, origin: _Origin, stdout: int, stderr: int) -> NoReturn:
    """In the child: become the program, or say why not and end."""
    report = origin.report
    try:
        os.setsid()
        lineage.die_with_parent()
        if os.getppid() != origin.agent:
            os._exit(1)  # It died before it could take this along.
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, stdout, stderr)):
            os.dup2(fd, number)
        report = _keep_only(report)
        signal.set_wakeup_fd(-1)
        for number in origin.changed:
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
