"""Torch's process groups and stores, as seen from outside: when they are made, how who waits in
them gets out, and how nothing is left of them."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic  # noqa: TID251  (how long a store does not listen)
from types import ModuleType
from typing import Any

from unbroken.worker.boot.keepers import C10D, release, unbind
from unbroken.worker.boot.rendezvous import ask_for_no_names, await_listening
from unbroken.worker.channel import whole

from . import doubt
from .torch_sockets import TorchSockets

ARGUMENTS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers",
             "multi_tenant", "master_listen_fd", "use_libuv")  # fmt: skip
"""Of `TCPStore`, torch 2.6 to 2.13."""
DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Of the same."""
TRY_SECONDS = 0.1
"""Of a store's client, doubled by each that fails: each says so in the log, and looks up a name."""
SLICE = timedelta(seconds=0.01)
"""Of a wait for a collective: as often Python comes by."""
SLICE_OVER = "Operation timed out!"
"""What `Work::wait` says then, and nothing else does (torch 2.6 to 2.13)."""
COLLECTIVES = {*range(12), 15, 16}
"""`OpType` of torch 2.6 to 2.13, without those between two ranks, which end with a wait that is
over."""
UNUSED_REFERENCES = 4
"""To a group that only we hold: of the set, its copy, the loop that looks, the call that counts."""
RELEASE_SECONDS = 0.1
"""A group takes 10 ms for each peer, or, where gloo has lost a message, its timeout."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""With 1, which agents of torch set, and 3, the default, NCCL's watchdog ends the process within
0.1 s when a peer is lost (`handleException` in ProcessGroupNCCL.cpp): who is to leave would be dead
before it is told.  `_abort_process_group` wants it to be 0.  Who hangs is found by our agent."""
logger = logging.getLogger(__name__)
_held: set[Any] = set()
"""Groups of the attempt, so that nobody lets go of one last but `_release`."""
_releasing: list[threading.Thread] = []
_sockets = TorchSockets()
shut, forget = _sockets.shut, _sockets.forget
is_store_being_made, is_serving = _sockets.is_store_being_made, _sockets.is_serving


def watch() -> None:
    """From now on know which sockets are torch's; does nothing where there is no torch."""
    if C10D not in sys.modules and importlib.util.find_spec("torch") is None:
        return
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return
    if os.environ.get(ERROR_HANDLING, "1") == "1":
        os.environ[ERROR_HANDLING] = "0"
    store: Any = dist.TCPStore
    if hasattr(store.__init__, "__wrapped__"):
        return
    own = getattr(store.__init__, "torchs_own", None)
    if own is None:  # else the template of warm workers has
        ask_for_no_names()
    store.__init__ = _client(own or store.__init__)
    if hasattr(dist, "ProcessGroupGloo"):
        dist.ProcessGroupGloo.__init__ = _group(dist.ProcessGroupGloo.__init__)
    dist.ProcessGroup.__init__ = _kept(dist.ProcessGroup.__init__)
    dist.Work.wait = _sliced(dist.Work.wait)
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
    """Leave no group behind, whatever state a lost peer has left it in.

    Their threads end meanwhile (gloo's look up every 10 ms).  One that has lost a message waits
    until its timeout is over, and keeps what it holds, without a part in any later group.
    """
    c10d = sys.modules.get(C10D)
    if c10d is None:
        return
    _held.update(list(c10d._world.pg_map))
    try:
        if c10d.is_initialized():
            c10d.destroy_process_group()
    except Exception as error:  # noqa: BLE001  (its peers may be dead)
        logger.debug("groups cannot be destroyed: %r", error)
    _reset(c10d)
    let_go()


def let_go() -> None:
    """Keep no group any more: those that were destroyed end, in a thread."""
    _releasing[:] = [one for one in _releasing if one.is_alive()]
    held = [*_held]
    _held.clear()
    if held:
        _releasing.append(release(functools.partial(_release, held)))


def are_gone() -> bool:
    """Whether all that was destroyed is, after `RELEASE_SECONDS` at most for each."""
    for one in _releasing:
        one.join(RELEASE_SECONDS)
    return not any(one.is_alive() for one in _releasing)


def _release(held: list[Any]) -> None:
    """A group waits for its threads, which may wait for the GIL, or for a message that gloo has
    lost.  Its own destructor lets go of the GIL meanwhile; a model's reducer does not, and neither
    does the collector: neither of them may be the last to hold it (torch 2.13)."""
    groups = [weakref.ref(group) for group in held]
    held.clear()
    alive = [group for one in groups if (group := one()) is not None]
    if alive:
        # Models hold their groups in cycles.
        gc.collect()


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
    unbind(c10d)


def _sliced(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Have who waits for a collective of gloo come by in Python, where a signal reaches it: a
    broken connection does not end every wait."""

    @functools.wraps(wait)
    def patient(self: Any, *args: Any, **named: Any) -> Any:
        if args or named or not _is_gloos(self):
            return wait(self, *args, **named)
        while True:
            try:
                return wait(self, SLICE)
            except RuntimeError as error:
                if not str(error).startswith(SLICE_OVER):
                    raise

    return patient


def _is_gloos(work: Any) -> bool:
    backends = sys.modules[C10D]._world.pg_backend_config.values()
    is_gloo = all(one.rpartition(":")[2] == "gloo" for all_ in backends for one in all_.split(","))
    return is_gloo and int(work._get_op_type()) in COLLECTIVES


@whole
def _construct(size: int, function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """A group of so many ranks, or a store: in native code, nearly always."""
    making = _sockets.begin(size)
    try:
        function(*args, **named)
    finally:
        _sockets.end(making)


def _group(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(self: Any, *args: Any, **named: Any) -> None:
        # store, rank, size (torch 2.6 to 2.13)
        size = int(named["size"] if "size" in named else args[2])
        _construct(size, function, self, *args, **named)

    return make


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(self: Any, *args: Any, **named: Any) -> None:
        function(self, *args, **named)
        # Who makes a group for each epoch destroys them too.
        gone = [group for group in [*_held] if sys.getrefcount(group) <= UNUSED_REFERENCES]
        _held.difference_update(gone)
        _held.add(self)
        if gone:
            _releasing.append(release(gone.clear))

    return make


def _client(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a store's client connect when its server listens, and try for a short time only.

    One that comes sooner, or whose server dies meanwhile, backs off for 0.25 s and more in torch,
    which then is the time of the whole recovery; and while it backs off, neither a signal nor a
    socket gets it out.  The server of `init_process_group` waits for nobody: the group does.
    """

    @functools.wraps(function)
    def make(self: Any, *args: Any, **named: Any) -> None:
        given = dict(zip(ARGUMENTS, args, strict=False)) | named
        if given.get("is_master") or not {"host_name", "port"} <= given.keys():
            if given.get("multi_tenant") and "wait_for_workers" not in given:
                named["wait_for_workers"] = False
            _construct(0, function, self, *args, **named)
            return
        timeout = given.get("timeout", DEFAULT_TIMEOUT)
        until, tried = monotonic() + timeout.total_seconds(), 0
        while not _is_made(function, self, given, until, 2**tried):
            tried += 1
        self.set_timeout(timeout)

    return make


def _is_made(
    function: Callable[..., Any], store: Any, given: dict[str, Any], until: float, patience: int
) -> bool:
    """False: try again.  What torch raises, when the time is up."""
    took = await_listening(str(given["host_name"]), int(given["port"]), until - monotonic())
    seconds = min(max(TRY_SECONDS, 3 * took) * patience, max(until - monotonic(), TRY_SECONDS))
    try:
        _construct(0, function, store, **{**given, "timeout": timedelta(seconds=seconds)})
    except RuntimeError:
        if monotonic() > until:
            raise
        return False
    return True
