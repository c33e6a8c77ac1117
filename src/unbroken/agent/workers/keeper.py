"""The agent's parent: whatever happens to the agent, nothing that it started outlives it.

It is the process that the container starts (often process 1). It passes signals on and reaps. When
the agent has ended it kills every descendant, daemons included, and then ends with the agent's own
exit code. If the keeper itself is killed, the agent notices and does the same.

It also ends everything when the lease on the workers has run out and the agent has not ended them
(`core.agent.machine`): a frozen agent cannot. At the same time the kernel kills the agent
(`expiry`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection
from types import FrameType

from unbroken.agent.socket import directory as socket_directory

from . import lineage

LATE_SECONDS = 0.5
"""Seconds after the end of a lease in which the agent ends the workers itself."""
LOOK_SECONDS = 0.25
"""Seconds between looks while there is a lease: after a suspension of the machine timers are late
by as long."""
_LEASE = struct.Struct("=d")
_NONE = 0.0


def boot_seconds() -> float:
    """Return the seconds since the machine was booted, suspensions included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def send_lease(descriptor: int, until: float | None) -> None:
    """Send the keeper the end of the lease, by `boot_seconds`; None: there is none. Raises
    OSError."""
    os.write(descriptor, _LEASE.pack(_NONE if until is None else until))


def keep(run_agent: Callable[[int, int], int], signals: Collection[int]) -> int:
    """Run the agent in a child; return the exit code to end with.

    `run_agent` gets a descriptor that is readable once the keeper has ended, and one for
    `send_lease`.
    """
    lineage.adopt_orphans()
    keeper = os.pidfd_open(os.getpid())
    told, tells = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Until the child's number is known, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    agent = os.fork()
    if agent == 0:
        # Until the agent has handlers of its own a signal just ends it.
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        os.close(told)
        code = run_agent(keeper, tells)
        sys.stderr.flush()
        # No remaining work is worth the time of an orderly end.
        os._exit(code)
    os.close(tells)
    return _watch(agent, signals, told)


def _watch(agent: int, signals: Collection[int], told: int) -> int:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        lineage.kill(agent, number)

    wakes, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = _wait(agent, told, wakes)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    lineage.kill_children()
    socket_directory.remove()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait(agent: int, told: int, wakes: int) -> int:
    """Reap until the agent has ended, and end it with its lease; return its status."""
    until, is_over = _NONE, False
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == agent:
                break
        until = _newest(told, until)
        if until and boot_seconds() >= until + LATE_SECONDS:
            # Not once: a process may have been started meanwhile.
            lineage.kill_descendants()
            if not is_over:
                text = "the lease on the workers has run out; all is ended"
                sys.stderr.write(f"unbrokenrun: {text}\n")
            is_over = True
        if ended[0] == agent:
            return ended[1]
        select.select([told, wakes], [], [], LOOK_SECONDS if until else None)
        with contextlib.suppress(BlockingIOError):
            os.read(wakes, 4096)


def _newest(descriptor: int, until: float) -> float:
    """Return the last value written; `until` if there is none."""
    with contextlib.suppress(BlockingIOError):
        # After a stop of this process alone, thousands may wait; each is written as a whole.
        while values := os.read(descriptor, 512 * _LEASE.size):
            until = float(_LEASE.unpack(values[-_LEASE.size :])[0])
    return until
