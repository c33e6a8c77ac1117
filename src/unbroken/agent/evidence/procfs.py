"""Readings of a process from the kernel: nothing here waits for the process itself.

`/proc/PID/cmdline`, `environ` and `maps` are not read: they wait for a lock that a process in state
D may hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of /proc/PID/stat (proc(5))."""

    state: str
    parent: int
    cpu_seconds: float
    program: int = 0
    """Address of the stack, by chance another one for each program that is started; a fork that
    starts no program keeps it. 0: the kernel does not report it."""
    faults: int = 0
    """Page faults, minor and major."""
    children_seconds: float = 0.0
    """Processor time of children that have ended and that it has waited for, and of theirs."""


def stat(pid: int) -> Stat | None:
    """Return the fields; None: the process is gone."""
    text = _read(f"/proc/{pid}/stat")
    # The name in parentheses may hold anything, so count fields from its end.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        return None
    program = int(fields[25]) if len(fields) > 25 else 0
    seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    faults = int(fields[7]) + int(fields[9])
    ended = (int(fields[13]) + int(fields[14])) / _TICKS if len(fields) > 14 else 0.0
    return Stat(fields[0], int(fields[1]), seconds, program, faults, ended)


def waits_in(pid: int) -> str:
    """Return the kernel function in which the main thread waits; empty: it runs, or this is not
    known."""
    result = _read(f"/proc/{pid}/wchan")
    return "" if result == "0" else result


def io_bytes(pid: int) -> int | None:
    """Return the bytes read and written so far, caches included; None: not known."""
    fields = dict(line.split(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    if "rchar" not in fields:
        return None
    return int(fields["rchar"]) + int(fields["wchar"])


def waited_seconds(pid: int) -> float:
    """Return the seconds that its main thread was ready to run and had no processor; 0: not
    known."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def main_thread(pid: int) -> tuple[float, int] | None:
    """Processor seconds of its main thread, and how often it was given a processor; None: not
    known. `/proc/PID/stat` has hundredths of a second only, and those of all threads."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    # Kernels without CONFIG_SCHED_INFO write zeros.
    if len(fields) < 3 or fields[2] == "0":
        return None
    return int(fields[0]) / 1e9, int(fields[2])


def memory_bytes(pid: int) -> tuple[int, int] | None:
    """Return its own and shared memory in bytes; None: not known. Waits for the process's memory
    lock."""
    own = shared = 0
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()[1:]:
        name, _, value = line.partition(":")
        own += int(value.split()[0]) * 1024 if name.startswith("Private_") else 0
        shared += int(value.split()[0]) * 1024 if name in ("Shared_Clean", "Shared_Dirty") else 0
    return (own, shared) if own or shared else None


def is_python(pid: int) -> bool:
    """True if its program is an interpreter, by name."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return os.path.basename(program).startswith(("python", "pypy"))


def is_traceable(pid: int) -> bool:
    """True if the kernel lets this process read the memory of that one.

    User, capability and `kernel.yama.ptrace_scope` decide. True if the process is gone.
    """
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except PermissionError:
        return False
    except OSError:
        pass  # Gone, or going: the kernel has refused nothing.
    return True


def tracer(pid: int) -> int:
    """Return the process that traces it, which excludes other tracers; 0: none."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def name(pid: int) -> str:
    """Return the name of the program, as the kernel knows it; empty: it is gone."""
    return _read(f"/proc/{pid}/comm").strip()


def tree(pid: int) -> list[int]:
    """Return the process and all below it, by generations."""
    result = [pid]
    for one in result:
        result += _children(one)
    return result


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def _read(path: str) -> str:
    """Return the text of a file; empty: unreadable, because the process has ended or belongs to
    another user."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
