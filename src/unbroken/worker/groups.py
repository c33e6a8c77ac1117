"""Torch's process groups and stores, as seen from outside: which sockets are a store's, and how who
waits in them gets out.

A socket is a store's if it came to be while one was made, and Python did not make it.
Sockets that native code of another thread opens at that moment cannot be told from them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic  # noqa: TID251  (how long a store does not listen)
from types import ModuleType, TracebackType
from typing import Any

from . import doubt
from .channel import whole

C10D = "torch.distributed.distributed_c10d"
ARGUMENTS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers",
             "multi_tenant", "master_listen_fd", "use_libuv")  # fmt: skip
"""Of `TCPStore`, torch 2.6 to 2.13."""
DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Of the same."""
FIRST_TRY = timedelta(seconds=0.3)
"""Doubled by each that fails."""
TCP_CLOSE, TCP_LISTEN = 7, 10
"""States, as include/net/tcp_states.h of Linux numbers them."""
POLL_SECONDS = 0.001
POLL_SECONDS_MAX = 0.05
KEEPERS = ("torch.distributed.nn.functional", "torch.distributed.fsdp.sharded_grad_scaler",
           "torch.distributed.optim.zero_redundancy_optimizer")  # fmt: skip
"""Modules with `group.WORLD` as a default.  Imported while there is a group, as an optimizer does
with the first, they would keep it and its connections: its peers would wait (torch 2.6 to 2.13)."""
logger = logging.getLogger(__name__)


class _Sockets:
    """Known by inode: the number of a descriptor is another socket's as soon as it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making = 0
        self._before: set[int] = set()
        self._foreign: set[int] = set()
        self._made: set[int] = set()

    @whole
    def __enter__(self) -> None:
        """A group or a store is being made."""
        with self._lock:
            if self._making == 0:
                self._before, self._foreign = set(_inodes()), set()
            self._making += 1

    @whole
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is made, or cannot be."""
        with self._lock:
            self._making -= 1
            if self._making == 0:
                self._made |= set(_inodes()) - self._before - self._foreign

    def spare(self, sock: socket.socket) -> None:
        """Python has made it."""
        if self._making:
            with suppress(OSError):
                self._foreign.add(os.fstat(sock.fileno()).st_ino)

    def shut(self) -> None:
        """Throw out whoever reads, writes or connects, in this process and at the other ends."""
        with self._lock:
            known, found = self._made, _inodes()
            if self._making:
                known = known | (found.keys() - self._before - self._foreign)
        for inode in known & found.keys():
            _shut(found[inode], inode)

    def forget(self) -> None:
        """They are another attempt's now."""
        with self._lock:
            self._made.clear()


_sockets = _Sockets()
shut, forget = _sockets.shut, _sockets.forget


def watch() -> None:
    """From now on know which sockets are torch's; does nothing where there is no torch."""
    if C10D not in sys.modules and importlib.util.find_spec("torch") is None:
        return
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    store: Any = dist.TCPStore
    if hasattr(store.__init__, "__wrapped__"):
        return
    store.__init__ = _client(_watched(store.__init__))
    # Not around `_new_process_group_helper`, which would shut gloo's own connections down too: with
    # it, four ranks of torch 2.13 hung within a few kills.  The cause is not known.  Without, an
    # operation ends as its peers let go of their groups.
    made = socket.socket.__init__

    @functools.wraps(made)
    def make(self: socket.socket, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        _sockets.spare(self)

    socket.socket.__init__ = make  # type: ignore[method-assign]


def abort() -> None:
    """Throw out whoever waits in an NCCL collective, which no socket ends (torch 2.6 or newer)."""
    c10d = sys.modules.get(C10D)
    if c10d is None or not hasattr(c10d, "_abort_process_group") or not c10d.is_initialized():
        return
    if any("nccl" in str(config) for config in c10d._world.pg_backend_config.values()):
        doubt.begin()
        try:
            c10d._abort_process_group()
        except Exception as error:  # noqa: BLE001  (the function may be leaving by itself)
            logger.debug("groups cannot be aborted: %r", error)


def destroy() -> None:
    """Leave no group behind, whatever state a lost peer has left it in."""
    c10d = sys.modules.get(C10D)
    if c10d is None:
        return
    try:
        if c10d.is_initialized():
            c10d.destroy_process_group()
    except Exception as error:  # noqa: BLE001  (its peers may be dead)
        logger.debug("groups cannot be destroyed: %r", error)
    _reset(c10d)


def is_lost_peer(error: BaseException) -> bool:
    """Whether it may be what a rank sees when another has died."""
    if not isinstance(error, RuntimeError):
        return False
    c10d = sys.modules.get(C10D)
    if c10d is not None and isinstance(error, getattr(c10d, "DistError", ())):
        return True
    text = str(error).lower()
    return any(sign in text for sign in SIGNS)


SIGNS = (
    "gloo", "nccl", "c10d", "tcpstore", "process group", "socket",
    "connection reset", "connection closed", "connection refused", "broken pipe",
)  # fmt: skip
"""In what torch 2.6 to 2.13 raises as a plain RuntimeError."""


def _reset(c10d: ModuleType) -> None:
    """What a group that was half made leaves in torch's tables.  The count above all: it names the
    next groups, and must be the same in processes that begin now."""
    world = c10d._world
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag",
                  "tags_to_pg", "pg_coalesce_state"):  # fmt: skip
        getattr(world, table, {}).clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0
    for name in KEEPERS:
        for one in vars(sys.modules.get(name, c10d)).values():
            _unbind(getattr(one, "__init__", one) if isinstance(one, type) else one, c10d)


def _unbind(function: Any, c10d: ModuleType) -> None:
    """Put None, the group that there is then, for a group that is a function's default."""
    given = getattr(function, "__defaults__", None) or ()
    if any(isinstance(one, c10d.ProcessGroup) for one in given):
        kept = (None if isinstance(one, c10d.ProcessGroup) else one for one in given)
        function.__defaults__ = tuple(kept)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **named: Any) -> Any:
        with _sockets:
            return function(*args, **named)

    return make


def _client(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a store's client connect when its server listens, and try for a short time only.

    One that comes sooner backs off for 0.3 s and more in torch, which then is the time of the whole
    recovery; and while it backs off, neither a signal nor a socket gets it out.
    """

    @functools.wraps(function)
    def make(self: Any, *args: Any, **named: Any) -> None:
        given = dict(zip(ARGUMENTS, args, strict=False)) | named
        if given.get("is_master") or not {"host_name", "port"} <= given.keys():
            function(self, *args, **named)
            return
        timeout = given.get("timeout", DEFAULT_TIMEOUT)
        until, given["timeout"] = monotonic() + timeout.total_seconds(), min(timeout, FIRST_TRY)
        while not _is_made(function, self, given, until):
            given["timeout"] = min(timeout, 2 * given["timeout"])
        self.set_timeout(timeout)

    return make


def _is_made(function: Callable[..., Any], store: Any, given: dict[str, Any], until: float) -> bool:
    """False: try again.  What torch raises, when the time is up."""
    _await_listening(str(given["host_name"]), int(given["port"]), until)
    try:
        function(store, **given)
    except RuntimeError:
        if monotonic() > until:
            raise
        return False
    return True


def _await_listening(host: str, port: int, until: float) -> None:
    began, pause = monotonic(), threading.Event()
    while (now := monotonic()) < until:
        try:
            socket.create_connection((host, port), until - now).close()
        except ConnectionRefusedError:
            pause.wait(min(POLL_SECONDS + (now - began) / 10, POLL_SECONDS_MAX))
        except OSError:
            # Torch's own client finds out, and says what is wrong.
            return
        else:
            return


def _inodes() -> dict[int, int]:
    """Of the sockets of this process: descriptors by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut(fd: int, inode: int) -> None:
    """Shut down a connection over TCP, or one to be.  Never a socket that listens, gloo's thread
    that accepts would end the process; nor one that may listen soon, nobody could connect to it."""
    with suppress(OSError):
        copy = os.dup(fd)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                (state,) = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
                if state not in (TCP_CLOSE, TCP_LISTEN):
                    sock.shutdown(socket.SHUT_RDWR)
