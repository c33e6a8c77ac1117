"""Stacks of a Python process from outside, by py-spy: started, bounded, and read here.

py-spy pauses the process while it reads (not with `NONBLOCKING`). However py-spy ends, the process
then resumes. Local variables are never requested: they may hold secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from typing import Any

from unbroken.agent.workers.environment import ACCELERATE_LAUNCH, BOOT
from unbroken.errors import WorldError
from unbroken.wire.observation import FRAME_CHARACTERS, FRAMES_MAX, THREADS_MAX, ThreadStack

from . import procfs

PLAIN: tuple[str, ...] = ()
NATIVE = ("--native",)
NONBLOCKING = ("--nonblocking",)
OUTPUT_BYTES_MAX = 16 * 1024 * 1024
NOTE_CHARACTERS = 200
NOT_ALLOWED = (
    "the kernel does not let py-spy look into the process: give the container the capability "
    "SYS_PTRACE, or its node kernel.yama.ptrace_scope=0"
)
MISSING = "py-spy is not installed beside the agent's Python: pip install py-spy"
_BOOT = (BOOT, f"{os.path.dirname(BOOT)}/becoming.py", ACCELERATE_LAUNCH)
"""Files whose frames are below those of the user's program."""
_REFUSED = ("permission denied", "operation not permitted")
_IN_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)")
_UNKNOWN = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks from one look."""

    threads: tuple[ThreadStack, ...] = ()
    """The threads, the main thread first."""
    functions: tuple[str, ...] = ()
    """Functions of the main thread: Python's only, without lines."""
    ids: tuple[int, ...] = ()
    """Thread IDs of the kernel, in the order of `threads`."""
    gil_thread: int | None = None
    """ID of the thread that held the GIL; None: no thread did."""


def program() -> str:
    """Return the path of py-spy: next to the interpreter, where pip puts it, or in the path. Raises
    WorldError."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    result = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if result is None:
        raise WorldError(MISSING)
    return result


async def dump(pid: int, options: tuple[str, ...]) -> Stacks:
    """Look at the process once; on cancellation, end py-spy. Raises WorldError with the reason."""
    arguments = (program(), "dump", "--json", *options, "--pid", str(pid))
    with contextlib.ExitStack() as stack:
        # Files in memory, so that py-spy never waits for this process while it pauses the other.
        output, errors = (os.memfd_create(name) for name in ("output", "errors"))
        stack.callback(os.close, output)
        stack.callback(os.close, errors)
        try:
            pidfd = _spawn(arguments, output, errors)
        except OSError as error:
            raise WorldError(f"py-spy cannot be started: {error.strerror}") from error
        await _end(pidfd)
        text = os.pread(output, OUTPUT_BYTES_MAX, 0)
        if not text.strip():
            told = os.pread(errors, OUTPUT_BYTES_MAX, 0).decode(errors="replace")
            raise WorldError(_why(told, pid))
    return read(text, pid)


def _spawn(arguments: tuple[str, ...], output: int, errors: int) -> int:
    """Start a program; return its pidfd. The process cannot have been reaped yet: that is done in
    this thread."""
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    files = [null, (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
    return os.pidfd_open(os.posix_spawn(arguments[0], arguments, {}, file_actions=files))


async def _end(pidfd: int) -> None:
    """Wait for the end; on cancellation, bring it about.

    It does not use asyncio's subprocesses: the owner of the agent's children may reap this one
    first, and a pidfd is exact in any case.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def reap() -> None:
        loop.remove_reader(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(pidfd, reap)
    try:
        await ended
    except asyncio.CancelledError:
        if not loop.is_closed() and ended.cancelled():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        raise


def read(text: bytes, pid: int) -> Stacks:
    """Read the output of py-spy. Raises WorldError."""
    try:
        threads = sorted(json.loads(text), key=lambda item: _order(item, pid))
        for thread in threads:
            thread["frames"] = [
                frame for frame in thread["frames"] if frame["filename"] not in _BOOT
            ]
        shown = tuple(_thread(thread, pid) for thread in threads[:THREADS_MAX])
        functions = tuple(
            f"{frame['name']} {frame['filename']}"
            for thread in threads[:1]
            for frame in thread["frames"]
            if frame.get("module") is None
        )
        ids = tuple(_thread_id(thread) for thread in threads[:THREADS_MAX])
        owners = [_thread_id(thread) for thread in threads if thread.get("owns_gil")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorldError(
            f"what py-spy says is not understood: {error}"[:NOTE_CHARACTERS]
        ) from error
    return Stacks(shown, functions, ids, owners[0] if len(owners) == 1 else None)


def _thread_id(thread: dict[str, Any]) -> int:
    """Return the kernel's thread ID, or Python's if py-spy does not know the kernel's."""
    return int(thread.get("os_thread_id") or thread["thread_id"])


def _order(thread: dict[str, Any], pid: int) -> tuple[bool, bool, bool]:
    return not _is_main(thread, pid), not thread.get("owns_gil"), not thread.get("active")


def _is_main(thread: dict[str, Any], pid: int) -> bool:
    known = thread.get("os_thread_id")
    return bool(known == pid if known else thread.get("thread_name") == "MainThread")


def _thread(thread: dict[str, Any], pid: int) -> ThreadStack:
    frames = (_frame(frame) for frame in thread["frames"] if not _UNKNOWN.fullmatch(frame["name"]))
    shown, is_main = tuple(frames)[:FRAMES_MAX], _is_main(thread, pid)
    name = thread.get("thread_name") or ("MainThread" if is_main else "")
    return ThreadStack(str(name)[:FRAME_CHARACTERS], is_main, shown)


def _frame(frame: dict[str, Any]) -> str:
    name, where = frame["name"], frame.get("short_filename") or frame.get("filename") or "?"
    if frame.get("module") is None:
        where = f"{where}:{frame['line']}"
    else:
        name, where = shortened(name), os.path.basename(frame["module"])
    return f"{name[: max(0, FRAME_CHARACTERS - len(where) - 3)]} ({where})"[:FRAME_CHARACTERS]


def shortened(name: str) -> str:
    """Return the name of a C++ function without template and function parameters."""
    count = 1
    while count:
        name, count = _IN_BRACKETS.subn("", name)
    return name.removesuffix(" const").strip()


def _why(errors: str, pid: int) -> str:
    """Return the error and its causes in a line.

    ptrace(2) also fails with EPERM for a process that another one traces, or that has ended. So the
    capability is advised only if the kernel refuses to open the process's memory.
    """
    if (stat := procfs.stat(pid)) is None or stat.state in "ZX":
        return "it has ended"
    if any(text in errors.lower() for text in _REFUSED):
        if not procfs.is_traceable(pid):
            return NOT_ALLOWED
        if by := procfs.tracer(pid):
            return f"process {by} ({procfs.name(by) or 'ended'}) traces it: only one can at a time"
    told = errors.partition("Stack backtrace")[0].splitlines()
    lines = (line.strip().removeprefix("Error: ") for line in told)
    parts = [re.sub(r"^\d+: ", "", line) for line in lines if line and line != "Caused by:"]
    return f"py-spy: {': '.join(dict.fromkeys(parts)) or 'it said nothing'}"[:NOTE_CHARACTERS]
