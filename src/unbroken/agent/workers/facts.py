"""Facts that the kernel and the file system have about a worker's end."""

from __future__ import annotations

import os
import random
import re
import socket
import stat
from collections.abc import Collection
from pathlib import Path

from unbroken.errors import WorldError

ERROR_FILE_BYTES_MAX = 256 * 1024
SHARED_MEMORY_FREE_MIN = 64 * 1024
FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Below Kubernetes' node ports (30000-32767) and Linux' default ephemeral range (from 32768)."""


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


def free_port(taken: Collection[int], source: random.Random) -> int:
    """Return a port on which nothing listens at any address, and which is not in `taken`. Raises
    WorldError."""
    for _ in range(1000):
        port = source.randint(FIRST_PORT, min(LAST_PORT, _ephemeral() - 1))
        if port not in taken and _can_bind(port):
            return port
    raise WorldError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def _ephemeral() -> int:
    try:
        first = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    except OSError:
        return LAST_PORT + 1
    return int(first) if int(first) > FIRST_PORT else LAST_PORT + 1


def _can_bind(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family is socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError:
            # A host without IPv6 cannot answer, and does not need to.
            if family is socket.AF_INET:
                return False
            return not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6")
    return True
