"""Namespaces and mounts of one container, made by its own process before its program starts.

A container sees the host's files, with its volumes at their mount paths. Paths that the host lacks
are made to appear without touching the host: the nearest directory that exists is covered by a
tmpfs that binds everything it held. Root needs a mount namespace for this, any other user a user
namespace as well (same user inside and outside). Needs Linux 5.12 (mount_setattr).

Standard library only: this runs in the launcher, which loads nothing else.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

_libc = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, linux/mount.h; the numbers of the newer system calls are the same everywhere.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
MS_BIND, MS_MOVE, MS_REC, MS_UNBINDABLE, MS_PRIVATE = 0x1000, 0x2000, 0x4000, 1 << 17, 1 << 18
MNT_DETACH = 2
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH, AT_FDCWD = 1, 0x8000, 0x1000, -100
MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_RDONLY = 4, 1
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


class Isolation(Enum):
    """Degree to which this host lets a container have mounts of its own."""

    ROOT = "root"
    """Mount namespace, made by root."""
    USER = "user"
    """Mount namespace inside a user namespace."""
    NONE = "none"
    """None: volumes are only at their own place."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Something of the host that a container sees at a path."""

    source: str
    """Existing file or directory on the host."""
    target: str
    """Absolute path in the container."""
    read_only: bool = False


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of the calling process."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    _checked(_libc.prctl(option, argument, 0, 0, 0), "prctl")


def setns(fd: int, kind: int) -> None:
    """Enter a namespace."""
    _checked(_libc.setns(fd, kind), "setns")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    result = _libc.mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _checked(result, f"mount {target}")


def unshare(isolation: Isolation) -> None:
    """Leave the host's mount and host name namespaces; the user stays the same."""
    flags = CLONE_NEWNS | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if isolation is Isolation.USER:
        flags |= CLONE_NEWUSER
    _checked(_libc.unshare(flags), "unshare")
    if isolation is Isolation.USER:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)


def set_hostname(name: str) -> None:
    """Name this host name namespace."""
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), "sethostname")


def _clone(mount: Mount) -> int:
    """Take a detached copy of a part of the file tree, so that later mounts cannot hide it."""
    path = os.fsencode(mount.source)
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    fd = _checked(_libc.syscall(SYS_OPEN_TREE, AT_FDCWD, path, flags), f"open {mount.source}")
    if mount.read_only:
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
        result = _libc.syscall(
            SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, 32
        )
        _checked(result, f"read-only {mount.source}")
    return fd


def _attach(fd: int, target: str) -> None:
    result = _libc.syscall(
        SYS_MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH
    )
    _checked(result, f"mount at {target}")


def nearest_existing(path: str) -> str:
    """The deepest directory on the way to `path` that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def is_below(path: str, directory: str) -> bool:
    """`path` is `directory` or inside it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _open_up(directory: str, scratch: str) -> None:
    """Cover a directory with a writable one that holds the same things."""
    _mount("tmpfs", scratch, "tmpfs", 0, "mode=755")
    # Unbindable: else a bind of what contains the scratch would copy this mount into itself.
    _mount(None, scratch, None, MS_UNBINDABLE)
    with os.scandir(directory) as entries:
        for entry in entries:
            place = os.path.join(scratch, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), place)
                continue
            if entry.is_dir():
                os.mkdir(place)
            else:
                os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
            _mount(entry.path, place, None, MS_BIND | MS_REC)
    _mount(None, scratch, None, MS_PRIVATE)
    if directory != "/":
        _mount(scratch, directory, None, MS_MOVE)
        return
    os.chdir(scratch)
    _checked(_libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _make_place(target: str, *, is_directory: bool) -> None:
    if os.path.exists(target):
        if os.path.isdir(target) != is_directory:
            kinds = ("a directory", "a file") if is_directory else ("a file", "a directory")
            raise OSError(f"cannot mount {kinds[0]} on {target}, which is {kinds[1]}")
        return
    if is_directory:
        os.makedirs(target)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def mount_all(mounts: Iterable[Mount], scratch: str) -> None:
    """Mount everything, outer paths first; `scratch` is an empty directory of the container."""
    ordered = sorted(mounts, key=lambda mount: mount.target.count("/"))
    fds = [_clone(mount) for mount in ordered]
    for directory in _directories_to_open([mount.target for mount in ordered]):
        _open_up(directory, scratch)
    for fd, mount in zip(fds, ordered, strict=True):
        target = os.path.realpath(mount.target)
        # Asked of the copy: the source may be hidden by a mount already.
        _make_place(target, is_directory=stat.S_ISDIR(os.fstat(fd).st_mode))
        _attach(fd, target)
        os.close(fd)


def _directories_to_open(targets: Sequence[str]) -> list[str]:
    """Directories of the host in which something must appear, outer ones first."""
    result: set[str] = set()
    for position, target in enumerate(targets):
        # The inside of another volume is written to, as a container runtime does.
        if os.path.exists(target) or any(is_below(target, t) for t in targets[:position]):
            continue
        result.add(os.path.realpath(nearest_existing(os.path.dirname(target))))
    return sorted(result, key=lambda path: (path != "/", path.count("/")))


def join(pid: int, isolation: Isolation) -> None:
    """Enter the namespaces of a running container."""
    kinds = [("mnt", CLONE_NEWNS), ("uts", CLONE_NEWUTS)]
    if isolation is Isolation.USER:
        kinds.insert(0, ("user", CLONE_NEWUSER))
    fds = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for fd, kind in fds:
        setns(fd, kind)
        os.close(fd)


def supported() -> Isolation:
    """Try, in a child, what this host allows."""
    wanted = Isolation.ROOT if os.geteuid() == 0 else Isolation.USER
    for isolation in dict.fromkeys((wanted, Isolation.USER)):
        child = os.fork()
        if child == 0:
            _try(isolation)
        if os.waitpid(child, 0)[1] == 0:
            return isolation
    return Isolation.NONE


def _try(isolation: Isolation) -> None:
    status = 1
    try:
        unshare(isolation)
        os.close(_clone(Mount("/etc", "/etc", read_only=True)))
        set_hostname("check")
        status = 0
    except OSError:
        # Refused is the answer that was asked for.
        status = 1
    finally:
        os._exit(status)
