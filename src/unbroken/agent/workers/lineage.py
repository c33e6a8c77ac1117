"""Processes below this one: finding them, killing them, adopting those whose parents died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PF_EXITING = 4  # linux/sched.h
_PENDING = re.compile(rb"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, daemons included."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def children() -> list[int]:
    """Return the processes whose parent this is, including ended ones that are not yet reaped."""
    result: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                result += map(int, file.read().split())
    except FileNotFoundError:
        # A kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended.
        return _scan()
    return result


def _scan() -> list[int]:
    own = os.getpid()
    return [pid for pid, parent in _parents().items() if parent == own]


def _parents() -> dict[int, int]:
    """Return the parent of each process of the machine, as far as this process sees it."""
    return {int(name): _parent(int(name)) for name in os.listdir("/proc") if name.isdecimal()}


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, so count fields from its end.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def session(pid: int) -> int:
    """Return the session of a process; 0: the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def is_dying(pid: int) -> bool:
    """True if the process, with all its threads, is ending or has ended, or was sent SIGKILL.

    The kernel closes a process's connections a while before its parent can reap it, a long while on
    a busy node. So peers may report it as lost before its end is seen.
    """
    if _is_kill_pending(pid):
        return True
    if not _is_exiting(f"/proc/{pid}/stat"):
        return False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return True
    return all(_is_exiting(f"/proc/{pid}/task/{thread}/stat") for thread in threads)


def _is_exiting(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & PF_EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_kill_pending(pid: int) -> bool:
    """True if a signal ends the process: the kernel then keeps SIGKILL pending for each thread."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            pending = _PENDING.findall(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a child. It may have ended, but its pid cannot be in use again: it is not reaped."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal the process group of a child that leads one and is not reaped yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def kill_children() -> None:
    """Kill every descendant and wait for the end of each: for a parent that must adopt orphans."""
    while True:
        for pid in children():
            kill(pid)
        try:
            # Children of killed processes become ours, so look again after each end.
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def kill_descendants() -> None:
    """Kill every descendant that there is now, without waiting: for a parent that adopts orphans.

    A child that is stuck in the kernel does not end, and so does not leave its own children to this
    process. Parents are killed before their children, so that none of them sees a child end, and
    acts on it.
    """
    parents, below = _parents(), dict.fromkeys([os.getpid()])
    while found := [pid for pid, up in parents.items() if up in below and pid not in below]:
        below.update(dict.fromkeys(found))
    for pid in list(below)[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(pid)
            try:
                # The number may have been taken by another process before the descriptor was there.
                if _parent(pid) in below:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
