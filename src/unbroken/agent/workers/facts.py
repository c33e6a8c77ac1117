"""Facts about a worker's end: of the kernel and the file system, and the file of
TORCHELASTIC_ERROR_FILE.

torchrun's agent on each node writes such a file.  Here all agents of a job may write the same one.
The modification time of the file is the time of the error, so that a later error of another agent
does not replace it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from unbroken.log_lines import Log

ERROR_FILE_BYTES_MAX = 256 * 1024
SHARED_MEMORY_FREE_MIN = 64 * 1024


def oom_kills(cgroups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the OOM kills that the kernel has counted in this process's memory group; 0: not
    known.

    Inside a container with a cgroup namespace the own group is the root of the mount.
    """
    listed = Path("/proc/self/cgroup").read_text() if cgroups is None else cgroups
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files = [base / path.lstrip("/") / "memory.oom_control", base / "memory.oom_control"]
        else:
            continue
        for file in files:
            result = _counted(file)
            if result is not None:
                return result
    return 0


def _counted(file: Path) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def processors(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of processors that this process may use, by its affinity and its
    container's limit."""
    result = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return min(result, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        # No group, or no limit: "max".
        return result


def is_shared_memory_full(path: str = "/dev/shm") -> bool:
    """True if /dev/shm has no room for another allocation."""
    try:
        result = os.statvfs(path)
    except OSError:
        return False
    return result.f_bavail * result.f_frsize < SHARED_MEMORY_FREE_MIN


def error_path(directory: str) -> str:
    """Return the path of the file into which `@record` writes an error of the worker."""
    return f"{directory}/error.json"


def error_file(directory: str) -> str:
    """Return the text that `@record` left there; empty: none, or it cannot be read."""
    try:
        path = error_path(directory)
        with open(path, encoding="utf-8", errors="replace", opener=_regular) as file:
            return file.read(ERROR_FILE_BYTES_MAX)
    except OSError:
        return ""


def _regular(path: str, flags: int) -> int:
    """Open a regular file only: a pipe that a worker put there would hold the agent up."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no regular file")
    return handle


log = Log(__name__)


class ErrorFile:
    """Writes the file at `path`, or nothing if that is empty.

    `directory` is one of the agent's own; its modification time is used to read the time.
    """

    def __init__(self, path: str, directory: str) -> None:
        self._path = path
        self._directory = directory
        self._first: int | None = None
        """Time at which the first worker of this agent failed in this attempt, in ns."""
        self._own = 0
        """Time of the error that this agent has written; 0: none."""
        self._rested = 0
        """Time at which no worker of this agent lived. Older files are of another attempt."""
        self.rest()

    def begin(self) -> None:
        """Begin an attempt: remove the file of the one before, because the job has not failed."""
        found = _time(self._path) if self._own else None
        if found is not None and found <= max(self._own, self._rested):
            with self._noted():
                os.unlink(self._path)
        self._first, self._own = None, 0

    def rest(self) -> None:
        """Note that no worker of this agent lives."""
        with self._noted():
            if self._path:
                self._rested = self._now()

    def failed(self, directory: str, exit_code: int) -> None:
        """Hand on the error of a worker that failed, if it is the first.

        A worker that recorded no error counts, too: what follows it is no root cause.
        """
        with self._noted():
            if self._path:
                self._hand_on(directory, exit_code)

    def _hand_on(self, directory: str, exit_code: int) -> None:
        recorded = _time(error_path(directory))
        at = self._now() if recorded is None else recorded
        if self._first is not None and self._first <= at:
            return
        self._first = at
        other = _time(self._path)
        if recorded is None or (other is not None and self._rested < other <= at):
            return
        draft = f"{self._path}.draft-{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(_with_code(error_file(directory), exit_code))
        os.utime(draft, ns=(at, at))
        os.replace(draft, self._path)
        self._own = at

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("error file is not written", file=self._path, error=error)

    def _now(self) -> int:
        os.makedirs(self._directory, exist_ok=True)
        os.utime(self._directory)
        return os.stat(self._directory).st_mtime_ns


def _time(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _with_code(text: str, exit_code: int) -> str:
    """Return a recorded error with the exit code, as torchrun adds it.

    Source: torch 2.13 `ErrorHandler.dump_error_file`.
    """
    with contextlib.suppress(ValueError, RecursionError):
        error = json.loads(text)
        if isinstance(error, dict) and isinstance(error.get("message"), dict):
            error["message"]["errorCode"] = exit_code
            return json.dumps(error)
    return text
