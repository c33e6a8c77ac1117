"""Abort, destroy and release torch's process groups, whatever state a lost peer left them in."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from time import monotonic  # noqa: TID251  (in the user's process, at its own pace)
from types import ModuleType
from typing import Any

from unbroken.log_lines import Log
from unbroken.worker.boot.keepers import C10D, release, unbind

from . import doubt
from .torch_sockets import TorchSockets

UNUSED_REFERENCES = 4
"""References to a group that only this module holds: the set, its copy, the loop, the call that
counts."""
RELEASE_SECONDS = 0.1
"""Time for a group to end: 10 ms for each peer, or the group's timeout if gloo lost a message."""
POLL_SECONDS = 0.002
SIGNS = (
    "gloo", "nccl", "c10d", "tcpstore", "process group", "socket",
    "connection reset", "connection closed", "connection refused", "broken pipe",
)  # fmt: skip
"""Words in a plain RuntimeError of torch 2.6 to 2.13 after the loss of a peer."""
log = Log(__name__, "unbroken.worker: ")
_held: set[Any] = set()
"""Groups of the attempt: `_release` must drop the last reference to each."""
_releasing: list[threading.Thread] = []
sockets = TorchSockets()
shut, forget = sockets.shut, sockets.forget
is_store_being_made, is_serving = sockets.is_store_being_made, sockets.is_serving


def hold(group: object) -> None:
    """Keep a group until its attempt ends, and release those that nothing else refers to."""
    # A script that makes a group for each epoch destroys it too.
    gone = [held for held in [*_held] if sys.getrefcount(held) <= UNUSED_REFERENCES]
    _held.difference_update(gone)
    _held.add(group)
    if gone:
        _releasing.append(release(gone.clear))


def abort() -> None:
    """End waits for NCCL's collectives, which no socket ends (torch 2.6 or newer)."""
    c10d = sys.modules.get(C10D)
    if c10d is None or not hasattr(c10d, "_abort_process_group") or not c10d.is_initialized():
        return
    if any("nccl" in str(config) for config in c10d._world.pg_backend_config.values()):
        doubt.begin()
        try:
            c10d._abort_process_group()
        except Exception as error:  # noqa: BLE001  (the function may be destroying them itself)
            log.debug("groups not aborted", error=error)


def destroy() -> None:
    """Destroy all groups.

    Their threads end meanwhile (gloo's wake up every 10 ms). A group that lost a message waits
    until its timeout is over, and keeps its resources, but has no part in any later group.
    """
    c10d = sys.modules.get(C10D)
    if c10d is None:
        return
    _held.update(list(c10d._world.pg_map))
    try:
        if c10d.is_initialized():
            c10d.destroy_process_group()
    except Exception as error:  # noqa: BLE001  (its peers may be dead)
        log.debug("groups not destroyed", error=error)
    _reset(c10d)
    let_go()


def let_go() -> None:
    """Release the groups of the attempt, in a thread."""
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    held = [*_held]
    _held.clear()
    if held:
        _releasing.append(release(functools.partial(_release, held)))


def has_freed_port() -> bool:
    """Return whether no store's server listens here, or all released groups have ended.

    Waits for either, up to `RELEASE_SECONDS` for each group. The store goes long before a group
    that lost a message.
    """
    end = monotonic() + RELEASE_SECONDS * len(_releasing)
    while is_serving():
        alive = [thread for thread in _releasing if thread.is_alive()]
        if not alive or monotonic() > end:
            return not alive
        alive[0].join(POLL_SECONDS)
    return True


def _release(held: list[Any]) -> None:
    """Drop the last references to groups.

    The destructor of a group joins its threads, which may wait for the GIL or for a message that
    gloo lost.  It releases the GIL meanwhile; but a model's reducer that holds the last reference
    does not, nor does the garbage collector (torch 2.13).
    """
    groups = [weakref.ref(group) for group in held]
    held.clear()
    alive = [group for reference in groups if (group := reference()) is not None]
    if alive:
        # Models hold their groups in cycles.
        gc.collect()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error may be that of a rank whose peer has died."""
    if not isinstance(error, RuntimeError):
        return False
    c10d = sys.modules.get(C10D)
    if c10d is not None and isinstance(error, getattr(c10d, "DistError", ())):
        return True
    text = str(error).lower()
    return any(sign in text for sign in SIGNS)


def _reset(c10d: ModuleType) -> None:
    """Clear torch's tables of groups that were half made.

    Above all the count: it names the next groups, and must be the same in processes that begin now.
    """
    world = c10d._world
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag",
                  "tags_to_pg", "pg_coalesce_state"):  # fmt: skip
        getattr(world, table, {}).clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0
    unbind(c10d)
