"""The folder of the agent's socket for its workers.

The name is chosen before the agent is forked from its keeper, so that the keeper can remove it
after an agent that was killed. The agent holds a lock on the folder. If the keeper was killed too,
the next agent that starts finds the folder without a lock. That proves that its owner is gone, and
the folder is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat

PREFIX = "unbroken-"
_OWN = os.urandom(8).hex()
_SOCKET_START, _SOCKET_END = "hyperpod_elastic_agent_", ".sock"
PATH_BYTES_MAX = 107
"""Longest address of a unix socket in bytes (unix(7))."""
NAMES_BYTES = 70
"""Bytes of the names below the base, at most."""
SWEPT_MAX = 1000
"""Folders of other agents that one start examines."""


def base() -> str:
    """Return the folder that holds socket folders: XDG_RUNTIME_DIR if only this user can enter it,
    else that of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _fits(runtime) and _is_private(runtime):
        return runtime
    import tempfile  # slow to load, and used by the keeper only at its end

    result = tempfile.gettempdir()
    return result if _fits(result) else "/tmp"


def path() -> str:
    """Return the folder of this agent alone."""
    return f"{base()}/{PREFIX}{_OWN}"


def socket_path() -> str:
    """Return the address of this process's socket."""
    return f"{path()}/{_SOCKET_START}{os.getpid()}{_SOCKET_END}"


def make() -> int:
    """Make the folder of this agent and lock it; return the descriptor that holds the lock. Raises
    OSError."""
    while True:
        os.mkdir(path(), 0o700)
        handle = _locked(path())
        # Another agent's sweep may have removed it before it was locked.
        if handle is not None and _is_still(handle, path()):
            return handle
        if handle is not None:
            os.close(handle)


def remove() -> None:
    """Remove the folder of this agent, if it is there."""
    _remove(path())


def sweep() -> None:
    """Remove the folders of this user's agents that are gone."""
    with contextlib.suppress(OSError), os.scandir(base()) as entries:
        names = [entry.name for entry in entries if _is_ours(entry.name)][:SWEPT_MAX]
        for name in names:
            directory = f"{base()}/{name}"
            handle = _locked(directory)
            if handle is not None:
                # An agent of a release without locks still answers.
                if not _answers(directory):
                    _remove(directory)
                os.close(handle)


def _answers(directory: str) -> bool:
    """True if a process listens at a socket in the folder."""
    for name in os.listdir(directory):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            probe.connect(f"{directory}/{name}")
            return True
    return False


def _is_ours(name: str) -> bool:
    number = name.removeprefix(PREFIX)
    return name != number and len(number) == len(_OWN) and set(number) <= set("0123456789abcdef")


def _locked(directory: str) -> int | None:
    """Return a descriptor that locks a folder of this user's; None: its owner lives, or the folder
    is not one."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(directory, flags)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _is_still(handle: int, directory: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(directory))
    return False


def _remove(directory: str) -> None:
    """Remove a folder and the sockets in it; a folder that holds other things stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(_SOCKET_START) and name.endswith(_SOCKET_END):
                os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def _fits(directory: str) -> bool:
    return len(os.fsencode(directory)) <= PATH_BYTES_MAX - NAMES_BYTES


def _is_private(directory: str) -> bool:
    try:
        result = os.stat(directory)
    except OSError:
        return False
    is_own = result.st_uid == os.geteuid() and not result.st_mode & 0o077
    return is_own and stat.S_ISDIR(result.st_mode) and os.access(directory, os.W_OK)
