"""The agent's parent: whatever happens to the agent, nothing that it started outlives it.

It is the process that the container starts (often process 1): it passes signals on, reaps, and when
the agent has ended kills every descendant, the daemonised ones too, before it ends with the agent's
own exit code.  If the keeper itself is killed, the agent notices and does the same.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType

from unbroken.agent.socket import directory as socket_directory

from . import lineage


def keep(run_agent: Callable[[int], int], signals: Collection[int]) -> int:
    """Run the agent in a child; returns the exit code to end with.

    `run_agent` is given a descriptor that is readable once the keeper has ended.
    """
    lineage.adopt_orphans()
    keeper = os.pidfd_open(os.getpid())
    # Until the child's number is known, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    agent = os.fork()
    if agent == 0:
        # Until the agent has handlers of its own a signal just ends it.
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = run_agent(keeper)
        sys.stderr.flush()
        # Nothing is left to do that is worth the time of an orderly end.
        os._exit(code)
    return _watch(agent, signals)


def _watch(agent: int, signals: Collection[int]) -> int:
    def pass_on(number: int, _frame: FrameType | None) -> None:
        lineage.kill(agent, number)

    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == agent:
            break
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    lineage.kill_children()
    socket_directory.remove()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
