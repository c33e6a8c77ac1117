"""Kills what runs of a node, at once and for certain, as a loss of power would."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from unbroken.local.node.driver import pods_below
from unbroken.local.node.processes.process import MARKER, Run, kill_marked, select_readable
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, descendants, start_ticks


def kill_pods(directory: Path) -> None:
    """Kill every process of a node's pods, beginning with those that would report it. Blocks."""
    kill_runs([run for files in pods_below(directory) for run in files.live_runs()])


def kill_runs(runs: Sequence[Run]) -> None:
    """Kill every process of these, and close them.  Blocks."""
    try:
        for run in runs:
            _kill_run(run)
        for run in runs:
            # Processes that had left its family.
            kill_marked(run.details[MARKER])
    finally:
        for run in runs:
            run.close()


def kill_gpu_users(directory: Path) -> int:
    """Kill the containers of a node that hold GPUs; return their number. Blocks.

    Their supervisors stay alive to report how they ended.
    """
    runs = list(_gpu_users(directory))
    try:
        for run in runs:
            run.signal(SIGKILL_ALL)
        for run in runs:
            select_readable(run.pidfd)
            kill_marked(run.details[MARKER])
    finally:
        for run in runs:
            run.close()
    return len(runs)


def _gpu_users(directory: Path) -> Iterator[Run]:
    for files in pods_below(directory):
        for run in files.live_runs() if (files.recorded() or {}).get("gpus") else ():
            # Containers of earlier versions do not record it; those of a pod with GPUs may use
            # them.
            if run.details.get("gpus", "all"):
                yield run
            else:
                run.close()


def _kill_run(run: Run) -> None:
    # Stop all of them first: a process that sees another die would react, and stopped ones cannot.
    run.signal(signal.SIGSTOP)
    stopped: dict[int, int] = {}
    while born := {pid for pid in descendants(run.supervisor) if pid not in stopped}:
        for pid in born:
            stopped[pid] = _signal(pid, start_ticks(pid), signal.SIGSTOP)
    for pid, ticks in stopped.items():
        _signal(pid, ticks, signal.SIGKILL)
    run.signal(signal.SIGKILL)


def _signal(pid: int, ticks: int | None, number: int) -> int:
    """Signal the process that started at `ticks`, if it lives; gives `ticks` back, or 0."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        # The number was checked after the descriptor was had: it cannot change hands.
        if ticks is None or start_ticks(pid) != ticks:
            return 0
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return 0
    finally:
        os.close(handle)
    return ticks
