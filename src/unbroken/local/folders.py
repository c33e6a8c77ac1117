"""The folder of a cluster: private to its user, and removed without touching anything else.

`up` makes what `MADE` names and nothing else at the top of the folder.  `purge` removes these names
only, follows no symbolic link, and leaves the folder where something else is in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from unbroken.errors import WorldError

from .state import ClusterOptions, Paths

DATABASE = "objects.db"
CREDENTIALS = "cluster-api-credentials"
HISTORY = "ui-history.sqlite"
MADE = (
    *("nodes", "logs", "volumes", "launcher", "checkpoint-memory"),
    *("apiserver.lock", "internal.kubeconfig", "kubelet-token"),
    *("token", "server.pem", "kubeconfig", "up.log", "up.json", "operator.key", CREDENTIALS),
    *("ui.json", "ui.html"),
    *(HISTORY, f"{HISTORY}-wal", f"{HISTORY}-shm", f"{HISTORY}.damaged"),
    *(DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"),
    # Last, so that a purge that was interrupted can be repeated.
    *("up.lock", "cluster.json"),
)
"""Names that `up` makes in the folder of a cluster."""
_SQLITE = b"SQLite format 3\0"


def private(directory: Path) -> str:
    """Make the folder of a cluster, which no other user may enter; return a notice if that was
    changed.

    Raises WorldError if it belongs to another user, or has other contents that must be left as they
    are.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = directory.stat()
    if result.st_uid != os.geteuid():
        raise WorldError(
            f"{directory} belongs to user {result.st_uid}, not to you ({os.geteuid()}): choose "
            "another folder with --dir"
        )
    entries = set(os.listdir(directory))
    is_cluster = _is_cluster(directory) or _lacks_options(directory)
    taken = sorted((entries & set(MADE)) - {"up.log"})
    if taken and not is_cluster:
        raise WorldError(
            f"{directory} is no folder of a cluster, and holds {', '.join(taken)}: choose an empty "
            "folder with --dir"
        )
    mode = stat.S_IMODE(result.st_mode)
    if not mode & 0o077:
        return ""
    if entries - {"up.log"} and not is_cluster:
        raise WorldError(
            f"{directory} has mode {mode:o} and other things in it, but the folder of a cluster "
            "must be closed to other users: choose an empty folder with --dir, or run: chmod 700 "
            f"{directory}"
        )
    directory.chmod(0o700)
    return f"{directory} had mode {mode:o}; it is now 700, closed to other users"


def purge(paths: Paths) -> list[str]:
    """Remove what `up` made, and the folder where nothing else is in it; the names that are left.

    WorldError: it is no folder of a cluster, or not this user's, a symbolic link, in use, or holds
    a mounted file system.  Nothing has been removed then.
    """
    directory = paths.directory
    with _opened(directory) as folder, _unused(paths):
        if mounted := _mounts_below(directory):
            raise WorldError(f"{mounted[0]} is mounted in {directory}: unmount it first")
        for name in MADE:
            _remove(name, folder)
        left = sorted(os.listdir(folder))
    if not left:
        directory.rmdir()
    return left


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of the folder, if it is the folder of a cluster and this user's."""
    if directory.is_symlink():
        raise WorldError(
            f"{directory} is a symbolic link: name the folder itself, --dir {directory.resolve()}"
        )
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (owner := os.fstat(folder).st_uid) != os.geteuid():
            raise WorldError(f"{directory} belongs to user {owner}: purge it as that user")
        if not _is_cluster(directory):
            raise WorldError(
                f"{directory} is not deleted: `unbroken up` did not make it (no cluster.json and "
                f"{DATABASE} of its own in it)"
            )
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _unused(paths: Paths) -> Iterator[None]:
    """Keep the next `up` of the folder from starting."""
    handle = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise WorldError(
            f"a cluster runs from {paths.directory}: run `unbroken down --purge` again"
        ) from error
    finally:
        os.close(handle)


def _is_cluster(directory: Path) -> bool:
    """True if `up` has made it: its options can be read, and its database is one or is not there
    yet."""
    try:
        options = _own_file(directory / "cluster.json")
        if options is None:
            return False
        msgspec.json.decode(options, type=ClusterOptions)
        database = _own_file(directory / DATABASE, len(_SQLITE))
    except (OSError, msgspec.MsgspecError):
        return False
    if database is None:
        # `up` was interrupted at its first start, or a purge was.
        return not any((directory / name).exists() for name in ("nodes", "volumes"))
    return database in (b"", _SQLITE)


def _lacks_options(directory: Path) -> bool:
    """True if a person has removed cluster.json to start over with other options."""
    names = ("apiserver.lock", "kubelet-token", "server.pem")
    return (
        not os.path.lexists(directory / "cluster.json")
        and all((directory / name).is_file() for name in names)
        and _own_file(directory / DATABASE, len(_SQLITE)) == _SQLITE
    )


def _own_file(path: Path, size: int = 1 << 20) -> bytes | None:
    """The beginning of a regular file; None: it is not there."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no file")
        return file.read(size)


def _remove(name: str, folder: int) -> None:
    """Remove a name of the folder; what cannot be removed is left."""
    try:
        result = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(result.st_mode):
        shutil.rmtree(name, dir_fd=folder, ignore_errors=True)
    else:
        os.unlink(name, dir_fd=folder)


def _mounts_below(directory: Path) -> list[str]:
    """Mount points in the folder."""
    start = f"{directory.resolve()}/"
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4].encode().decode("unicode_escape") for line in file]
    return [place for place in places if place.startswith(start)]
